"""A Llama of a given shape with random weights, as GGUF files in several types: speed does not ask what
weights mean.

llama.cpp quantises it, so that ours and llama.cpp can run the same blocks; the model itself is there as well.
Its vocabulary is that of a real model, and filled up with tokens that no text gives.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import gguf
import numpy as np

from bench_peers.contestant import run_process
from bench_peers.models import PeersFolder

HIDDEN: Final = 2048
LAYERS: Final = 16
HEADS: Final = 32
KV_HEADS: Final = 8
HEAD_DIM: Final = 64
INTERMEDIATE: Final = 8192
VOCABULARY: Final = 128_256
CONTEXT: Final = 4096
SHAPE: Final = "Llama-3.2-1B"
WHOLE: Final = "F16"
"""The model itself, as llama.cpp names the type."""

_UNUSED: Final = 5  # llama.cpp's number for tokens that stand for no text
_TOKENS, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_QUANTIZE: Final = Path(__file__).resolve().parents[2] / "ci" / "measure" / "run_llamacpp.py"


def make(kinds: tuple[str, ...], vocabulary: Path, folder: Path, peers: PeersFolder) -> dict[str, Path]:
    """Return the model as a file and as one for each of ``kinds``, as llama.cpp names them (``Q8_0``), made
    unless they are there.

    vocabulary: a GGUF file whose tokenizer is taken. Takes 5 GB of disk. Raises ResourceError if llama.cpp
        fails.
    """
    files = {kind: folder / f"{SHAPE}-random.{kind}.gguf" for kind in (WHOLE, *kinds)}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".random-", dir=folder) as scratch:
        for kind, path in files.items():
            if path.exists():
                continue
            made = Path(scratch) / path.name
            if kind == WHOLE:
                _write(made, vocabulary)
            else:
                run_process(peers.main_python, _QUANTIZE, "quantize", files[WHOLE], made, kind)
            made.rename(path)
    return files


def _write(path: Path, vocabulary: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(500_000.0)
    writer.add_vocab_size(VOCABULARY)
    _add_tokenizer(writer, vocabulary)
    random = np.random.default_rng(0)
    wide, narrow = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "attn_q": (wide, HIDDEN),
        "attn_k": (narrow, HIDDEN),
        "attn_v": (narrow, HIDDEN),
        "attn_output": (HIDDEN, wide),
        "ffn_gate": (INTERMEDIATE, HIDDEN),
        "ffn_up": (INTERMEDIATE, HIDDEN),
        "ffn_down": (HIDDEN, INTERMEDIATE),
    }
    writer.add_tensor("token_embd.weight", _matrix(random, (VOCABULARY, HIDDEN)))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", _matrix(random, shape))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matrix(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Return normal numbers of a deviation that keeps the residual stream's size, as trained models nearly
    do.
    """
    return (random.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)).astype(np.float16)


def _add_tokenizer(writer: gguf.GGUFWriter, vocabulary: Path) -> None:
    fields = gguf.GGUFReader(vocabulary).fields
    taken = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.ggml.")}
    missing = range(len(taken[_TOKENS]), VOCABULARY)
    taken[_TOKENS] += [f"<|unused_{number}|>" for number in missing]
    taken[_TYPES] += [_UNUSED] * len(missing)
    for name, value in taken.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
