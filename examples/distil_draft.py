"""Makes a draft model for ``--draft`` out of a model's own layers: some are left out, and the rest learns,
for some minutes, to say what the whole model says in text that it has written itself. The artifact tells with
each token how likely it and others were, so that the whole model is not run again to learn from.

    pip install 'llorch[cpu,export]' torch transformers
    llorch export model.gguf --output artifacts/model
    python examples/distil_draft.py model.gguf artifacts/model draft --layers 0,1,2,14,28,29 --minutes 30
    llorch export draft --output artifacts/draft --precision int4 --block-size 64 --head-precision int4
    llorch serve artifacts/model --draft artifacts/draft

The source is a GGUF file or a folder as transformers writes it. Embeddings and head stay as they are, so that
the tokenizer does too. Without --minutes nothing is learned. Text is sampled by llorch; an instruction model
that is given its template up to the user's turn invents the question too (Xu et al. 2024, Magpie).
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import llorch

TOKENS = 256  # of a text
AT_ONCE = 16  # texts that are sampled together
BATCH = 2  # texts of a step
TOP = 20  # tokens of a place that are learned, the most that an answer tells
RATE = 1e-3


def opened(source: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model of a source, in float32, and its tokenizer."""
    folder, more = (source, {}) if source.is_dir() else (source.parent, {"gguf_file": source.name})
    tokenizer = AutoTokenizer.from_pretrained(str(folder), **more)
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, **more), tokenizer


def shortened(model: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """Return a model that has these layers of another one alone, and all else of it."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in layers]
    if hasattr(config, "quantization_config"):  # of the file, whose weights are float32 by now
        del config.quantization_config
    short = type(model)(config)
    for place, index in enumerate(layers):
        short.model.layers[place].load_state_dict(model.model.layers[index].state_dict())
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        short.get_submodule(name).load_state_dict(model.get_submodule(name).state_dict())
    return short


@dataclass
class Texts:
    """Texts and what their writer thought: at each place, the likeliest tokens and their log-probabilities.

    ids: [texts, TOKENS]. likely: [texts, places, TOP], of the tokens that stand ``places`` from the end.
    """

    ids: torch.Tensor
    likely: torch.Tensor
    logprobs: torch.Tensor


def written(artifact: Path, opening: str, seconds: float) -> Texts:
    """Return texts of an artifact's own, as many as it writes in so long."""
    answers: list[llorch.Answer] = []
    until = time.monotonic() + seconds
    with llorch.load(artifact, slots=AT_ONCE, max_context=2 * TOKENS) as model:
        start = model.tokenize(opening)
        while time.monotonic() < until or not answers:
            answers += model.sample(
                opening,
                AT_ONCE,
                temperature=1.0,
                max_tokens=TOKENS - len(start),
                ignore_eos=True,
                logprobs=TOP,
                seed=len(answers),
            )
            say(f"{len(answers)} texts")
    tops = [[place.top[:TOP] for place in answer.logprobs] for answer in answers]
    return Texts(
        torch.tensor([[*start, *answer.token_ids] for answer in answers]),
        torch.tensor([[[token.token_id for token in top] for top in places] for places in tops]),
        torch.tensor([[[token.logprob for token in top] for top in places] for places in tops]),
    )


def distil(
    short: PreTrainedModel, texts: Texts, seconds: float, clock: Callable[[], float] = time.monotonic
) -> None:
    """Have a model learn the distributions of texts: cross-entropy over the likeliest tokens of each place,
    AdamW, a cosine of time. The table of tokens is left as it is.
    """
    learned = [*short.model.layers.parameters(), *short.model.norm.parameters()]
    short.requires_grad_(False)
    for parameter in learned:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(learned, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    places, started, step = texts.likely.shape[1], clock(), 0
    while (share := (clock() - started) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * share))
        some = torch.randint(len(texts.ids), (BATCH,), generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.bfloat16):
            logits = short(texts.ids[some, :-1]).logits[:, -places:]
        found = logits.float().log_softmax(-1).gather(-1, texts.likely[some])
        loss = -(texts.logprobs[some].softmax(-1) * found).sum(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            say(f"{share * seconds:.0f} s, step {step}: {loss.item():.3f} nats")
        step += 1


def say(text: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(f"{text}\n")


def main() -> None:
    """Do as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="what the artifact was exported from")
    parser.add_argument("artifact", type=Path, help="the artifact that is to be guessed for")
    parser.add_argument("output", type=Path, help="folder for the draft, to be exported")
    parser.add_argument("--layers", required=True, help="those that stay, from 0 on, as 0,1,28,29")
    parser.add_argument("--minutes", type=float, default=0.0, help="to write texts, two fifths, and to learn")
    parser.add_argument("--opening", default="<|im_start|>user\n", help="what texts begin with")
    given = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = opened(given.source)
    short = shortened(model, [int(index) for index in given.layers.split(",")])
    if given.minutes:
        distil(short, written(given.artifact, given.opening, 24 * given.minutes), 36 * given.minutes)
    short.save_pretrained(given.output)
    tokenizer.save_pretrained(given.output)


if __name__ == "__main__":
    main()
