"""A small Llama with weights that mean something: trained on the spot on the Python standard library's
sources.

Random weights say little about quantisers, and published small models come already quantised. Run as
``python -m support.builders.trained_llama FOLDER [--seed N]`` it takes some minutes on two cores and leaves a
Hugging Face folder plus ``heldout.txt`` (text the model has not seen, to measure on) and ``calibration.txt``
(text it has seen). The seed is of the first weights and of the windows trained on; equal seeds give equal
weights only on the same machine, Python and torch.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, BATCH, CONTEXT = 700, 4, 128
PEAK_RATE, WARM_UP = 4e-3, 60
EVERY = 8  # one module in so many is read: more than the training sees anyway
HELD_OUT = ("argparse.py", "statistics.py", "zipfile/__init__.py", "textwrap.py")
HELD_OUT_CHARACTERS = 30_000
EOS = "<|eos|>"
CONFIG = {
    "vocab_size": 1024,
    "hidden_size": 256,  # K-quants of llama.cpp need rows of a multiple of 256
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 2.0**-17,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
}


def sources(*, held_out: bool) -> list[str]:
    """Return the standard library's modules, in the order of their names; test suites and site-packages
    excluded.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    chosen = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "test" in name or "site-packages" in name or (name in HELD_OUT) != held_out:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        chosen.append(text[:HELD_OUT_CHARACTERS] if held_out else text)
    return chosen if held_out else chosen[::EVERY]


def byte_pair_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer of the config's vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        show_progress=False,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train(ids: np.ndarray, seed: int) -> LlamaForCausalLM:
    """Train on random windows of ``ids``; print the loss now and then."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # matrices this small gain nothing from a second one, and sums keep their order
    rng = np.random.default_rng(seed)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_RATE, total_steps=STEPS, pct_start=WARM_UP / STEPS
    )
    started = time.perf_counter()
    for step in range(STEPS):
        starts = rng.integers(0, len(ids) - CONTEXT, BATCH)
        batch = torch.from_numpy(np.stack([ids[s : s + CONTEXT] for s in starts]))
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == STEPS - 1:
            took = time.perf_counter() - started
            print(f"step {step}: loss {loss.item():.3f}, {took:.0f} s", flush=True)  # noqa: T201 - takes minutes
    return model


def write(folder: Path, seed: int = 0) -> None:
    """Train and write the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = sources(held_out=False)
    tokenizer = byte_pair_tokenizer(texts)
    ids = np.concatenate([np.array(e.ids, np.int64) for e in tokenizer.encode_batch(texts)])
    train(ids, seed).save_pretrained(folder, safe_serialization=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "heldout.txt").write_text("".join(sources(held_out=True)), encoding="utf-8")
    (folder / "calibration.txt").write_text("".join(texts[::5])[:200_000], encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.folder, arguments.seed)
