"""Makes a draft model for ``--draft`` out of a model's own layers: some are left out, and the rest learns,
for some minutes, to say what the whole model says in text that it has written itself.

    pip install 'llorch[cpu,export]' torch transformers
    llorch export model.gguf --output artifacts/model
    python examples/distil_draft.py model.gguf artifacts/model draft --layers 0,1,28,29 --minutes 10
    llorch export draft --output artifacts/draft --recipe cpu-fast
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
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import llorch

TOKENS = 256  # of a text
AT_ONCE = 16  # texts that are sampled together
BATCH = 2  # texts of a step
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


def written(artifact: Path, opening: str, seconds: float) -> torch.Tensor:
    """Return texts of an artifact's own, as ids [texts, TOKENS], as many as it writes in so long."""
    texts: list[list[int]] = []
    until = time.monotonic() + seconds
    with llorch.load(artifact, slots=AT_ONCE, max_context=2 * TOKENS) as model:
        start = model.tokenize(opening)
        while time.monotonic() < until or not texts:
            answers = model.sample(
                opening,
                AT_ONCE,
                temperature=1.0,
                max_tokens=TOKENS - len(start),
                ignore_eos=True,
                seed=len(texts),
            )
            texts += [[*start, *answer.token_ids] for answer in answers]
    return torch.tensor(texts)


def distil(model: PreTrainedModel, short: PreTrainedModel, texts: torch.Tensor, seconds: float) -> None:
    """Have ``short`` learn the distributions of ``model`` over texts: KL divergence, AdamW, a cosine of time.

    The table of tokens is left as it is.
    """
    learned = list(short.model.layers.parameters())
    learned += list(short.model.norm.parameters())
    short.requires_grad_(False)
    for parameter in learned:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(learned, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    started, step = time.monotonic(), 0
    while (share := (time.monotonic() - started) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * share))
        batch = texts[torch.randint(len(texts), (BATCH,), generator=torch.Generator().manual_seed(step))]
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = model(batch).logits
            found = short(batch).logits
        loss = torch.nn.functional.kl_div(
            found.float().log_softmax(-1).flatten(0, 1),
            wanted.float().log_softmax(-1).flatten(0, 1),
            reduction="batchmean",
            log_target=True,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            say(f"{time.monotonic() - started:.0f} s, step {step}: {loss.item():.3f} nats")
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
    parser.add_argument("--layers", default="0,1,28,29", help="those that stay")
    parser.add_argument("--minutes", type=float, default=0.0, help="to write texts, a fifth, and to learn")
    parser.add_argument("--opening", default="<|im_start|>user\n", help="what texts begin with")
    given = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = opened(given.source)
    short = shortened(model, [int(index) for index in given.layers.split(",")])
    if given.minutes:
        texts = written(given.artifact, given.opening, 12 * given.minutes)
        say(f"{len(texts)} texts of {TOKENS} tokens")
        distil(model, short, texts, 48 * given.minutes)
    short.save_pretrained(given.output)
    tokenizer.save_pretrained(given.output)


if __name__ == "__main__":
    main()
