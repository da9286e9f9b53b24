"""A Llama of a given shape with random weights, as GGUF files in several types: speed does not ask what
weights mean.

llama.cpp quantises it, so that ours and llama.cpp can run the same blocks; the model itself is there as well.
Its vocabulary is that of a real model, and filled up with tokens that no text gives.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gguf
import numpy as np

from bench_peers.models import PeersFolder, made, quantize


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. name: of its files. experts, active: of each layer, and of them for each token; 0:
    it has one feed-forward block.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int = 4096
    experts: int = 0
    active: int = 0


LLAMA_1B: Final = Shape(
    "Llama-3.2-1B",
    hidden=2048,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    intermediate=8192,
    vocabulary=128_256,
)
LLAMA_8B: Final = Shape(
    "Llama-3.1-8B",
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14_336,
    vocabulary=128_256,
)
WHOLE: Final = "F16"
"""The model itself, as llama.cpp names the type."""

_UNUSED: Final = 5  # llama.cpp's number for tokens that stand for no text
_TOKENS, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


def make(
    shape: Shape, kinds: tuple[str, ...], vocabulary: Path, folder: Path, peers: PeersFolder
) -> dict[str, Path]:
    """Return the model as a file and as one for each of ``kinds``, as llama.cpp names them (``Q8_0``), made
    unless they are there.

    vocabulary: a GGUF file whose tokenizer is taken. Takes 5 GB of disk. Raises ResourceError if llama.cpp
        fails.
    """
    files = {kind: folder / f"{shape.name}-random.{kind}.gguf" for kind in (WHOLE, *kinds)}
    made(files[WHOLE], lambda target: write(shape, target, vocabulary))
    for kind in kinds:
        made(files[kind], functools.partial(quantize, peers.main_python, files[WHOLE], kind=kind))
    return files


def write(shape: Shape, path: Path, vocabulary: Path) -> None:
    """Write the model itself, in fp16. vocabulary: a GGUF file whose tokenizer is taken."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500_000.0)
    writer.add_vocab_size(shape.vocabulary)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.active)
    _add_tokenizer(writer, vocabulary, shape.vocabulary)
    random = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", _matrix(random, (shape.vocabulary, shape.hidden)))
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    for layer in range(shape.layers):
        for name, size in (_attention(shape) | _feed_forward(shape)).items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", _matrix(random, size))
        if shape.experts:  # routers are never quantised
            router = _matrix(random, (shape.experts, shape.hidden)).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(shape.hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _attention(shape: Shape) -> dict[str, tuple[int, ...]]:
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "attn_q": (wide, shape.hidden),
        "attn_k": (narrow, shape.hidden),
        "attn_v": (narrow, shape.hidden),
        "attn_output": (shape.hidden, wide),
    }


def _feed_forward(shape: Shape) -> dict[str, tuple[int, ...]]:
    stack, suffix = ((shape.experts,), "_exps") if shape.experts else ((), "")
    return {
        f"ffn_gate{suffix}": (*stack, shape.intermediate, shape.hidden),
        f"ffn_up{suffix}": (*stack, shape.intermediate, shape.hidden),
        f"ffn_down{suffix}": (*stack, shape.hidden, shape.intermediate),
    }


def _matrix(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return normal numbers of a deviation that keeps the residual stream's size, as trained models nearly
    do.
    """
    return (random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)).astype(np.float16)


def _add_tokenizer(writer: gguf.GGUFWriter, vocabulary: Path, size: int) -> None:
    fields = gguf.GGUFReader(vocabulary).fields
    taken = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.ggml.")}
    missing = range(len(taken[_TOKENS]), size)
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
