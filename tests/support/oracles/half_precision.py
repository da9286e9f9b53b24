"""Rounding to half precision from its definition, and checkpoints whose residual stream leaves float16's
range.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx

from support.builders.checkpoints import write_hf_folder

Weights = dict[str, npt.NDArray[np.float32]]


def float16_bytes(values: npt.NDArray[np.float32]) -> bytes:
    """Return IEEE half precision as Python's own packing has it: to nearest, ties to even."""
    return struct.pack(f"<{values.size}e", *values.ravel().tolist())


def bfloat16_bytes(values: npt.NDArray[np.float32]) -> bytes:
    """Return the upper halves of float32's bits, rounded to nearest, ties to even."""
    bits = values.ravel().view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return kept.astype("<u2").tobytes()


def as_float16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return values as float16 keeps them."""
    return np.frombuffer(float16_bytes(values), "<f2").astype(np.float32).reshape(values.shape)


def as_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return values as bfloat16 keeps them."""
    upper = np.frombuffer(bfloat16_bytes(values), "<u2").astype(np.uint32)
    return (upper << 16).view(np.float32).reshape(values.shape)


def rounded(
    round_: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]],
) -> Callable[[Weights], None]:
    """Return an edit of a checkpoint that rounds every weight."""

    def edit(weights: Weights) -> None:
        for name, value in weights.items():
            weights[name] = round_(value)

    return edit


def write_swollen_folder(path: Path, factor: float) -> Path:
    """Write the tiny model with a residual stream ``factor`` times as large, which its norms take back."""

    def edit(weights: Weights) -> None:
        for name, value in weights.items():
            if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
                weights[name] = value * np.float32(factor)

    return write_hf_folder(path, edit=edit)


def write_folder_with_a_bad_token(path: Path, token: int) -> Path:
    """Write a tiny model whose residual stream leaves float16's range behind one token only, in layer 0."""

    def edit(weights: Weights) -> None:
        weights["model.embed_tokens.weight"][token] = 65504
        weights["model.layers.0.self_attn.o_proj.weight"] *= np.float32(300)

    return write_hf_folder(path, edit=edit)


def stored(folder: Path, name: str) -> tuple[int, bytes]:
    """Return the ONNX type and the bytes of an initialiser in the data file."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.name == name)
    place = {entry.key: entry.value for entry in tensor.external_data}
    start, length = int(place["offset"]), int(place["length"])
    return tensor.data_type, (folder / place["location"]).read_bytes()[start : start + length]
