"""Tiny checkpoints whose weights are packed, written from each format's definition with numpy alone.

Codes, scales and zero points are drawn at random, so that every value of a code and every order of inputs
occurs; the values they stand for are computed here, independently of the exporter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from support.builders.checkpoints import Weights, tiny_config, write_hf_folder
from support.builders.raw_safetensors import load, save

FLOATS: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@dataclass
class Packed:
    """A folder, and the values that its tensors stand for, by name."""

    folder: Path
    config: dict[str, object]
    values: Weights
    stored: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def rewrite(self) -> None:
        """Write ``stored`` and ``config`` again after a test has changed them."""
        save(self.folder / "model.safetensors", self.stored)
        (self.folder / "config.json").write_text(json.dumps(self.config))


def linear_names(weights: Weights) -> list[str]:
    """Return the names of the matrices that tools pack, the head's included."""
    return [name for name, value in weights.items() if value.ndim == 2 and "embed" not in name]


def start(path: Path, overrides: dict[str, Any], *, seed: int = 0) -> Packed:
    """Write a plain folder whose matrices and vectors are float16, and return it as a packed one without
    packing.
    """
    folder = write_hf_folder(path, overrides, seed=seed)
    stored = {name: value.astype(np.float16) for name, value in load(folder / "model.safetensors").items()}
    values = {name: value.astype(np.float32) for name, value in stored.items()}
    return Packed(folder, dict(tiny_config(**overrides)), values, stored)


def pack_words(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int32]:
    """Pack codes [rows, count] into one stream of bits a row, the lowest first, padded to words of 32."""
    bit_planes = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    stream = bit_planes.reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.ascontiguousarray(np.packbits(stream, axis=1, bitorder="little")).view("<i4")


@dataclass
class Drawn:
    """A quantised matrix: codes [out, in], scales and zero points [out, groups], group of each input [in]."""

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[Any]
    zeros: npt.NDArray[np.uint8]
    index: npt.NDArray[np.int32]

    @property
    def values(self) -> npt.NDArray[np.float32]:
        scales, zeros = self.scales.astype(np.float32), self.zeros.astype(np.float32)
        found: npt.NDArray[np.float32] = scales[:, self.index] * (self.codes - zeros[:, self.index])
        return found


def drawn(
    shape: tuple[int, ...],
    rng: np.random.Generator,
    *,
    bits: int,
    group: int,
    symmetric: bool = True,
    order: bool = False,
    scales: str = "float16",
) -> Drawn:
    """Draw a matrix whose values are about as large as a tiny model's. order: groups are scattered."""
    rows, columns = shape
    size = columns if group == -1 else min(group, columns)
    groups, levels = -(-columns // size), 2**bits
    index = np.arange(columns, dtype=np.int32) // size
    if order:
        index = rng.permutation(index)
    width = 2 / (levels * np.sqrt(columns))
    zeros = rng.integers(0, levels, (rows, groups), dtype=np.uint8)
    if symmetric:
        zeros[:] = levels // 2
    return Drawn(
        codes=rng.integers(0, levels, shape, dtype=np.uint8),
        scales=rng.uniform(width / 2, width * 2, (rows, groups)).astype(FLOATS[scales]),
        zeros=zeros,
        index=index,
    )


def write_gptq(
    path: Path,
    overrides: dict[str, Any],
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    order: bool = False,
    version: int = 1,
    scales: str = "float16",
    skip: tuple[str, ...] = (),
    **settings: object,
) -> Packed:
    """Write a folder as AutoGPTQ or GPTQModel do. skip: parts of names of modules that stay plain."""
    packed = start(path, overrides)
    rng = np.random.default_rng(7)
    for name in linear_names(packed.values):
        if any(part in name for part in skip):
            continue
        module = name.removesuffix(".weight")
        matrix = drawn(
            packed.values[name].shape,
            rng,
            bits=bits,
            group=group,
            symmetric=symmetric,
            order=order,
            scales=scales,
        )
        lacking = 1 if version == 1 else 0
        zeros = (matrix.zeros.astype(np.int16) - lacking).astype(np.uint8) & np.uint8(2**bits - 1)
        del packed.stored[name]
        packed.stored |= {
            f"{module}.qweight": np.ascontiguousarray(pack_words(matrix.codes, bits).T),
            f"{module}.qzeros": pack_words(np.ascontiguousarray(zeros.T), bits),
            f"{module}.scales": np.ascontiguousarray(matrix.scales.T),
            f"{module}.g_idx": matrix.index,
        }
        packed.values[name] = matrix.values
    packed.config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": order,
        "damp_percent": 0.01,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        **settings,
    }
    packed.rewrite()
    return packed
