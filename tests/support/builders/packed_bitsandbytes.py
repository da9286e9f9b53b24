"""Matrices as bitsandbytes stores them, by the definitions of its formats."""

from __future__ import annotations

import json
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from support.builders.packed_folders import Made, Maker, width_of

# As bitsandbytes' kernels have them: the quantiles, computed in single precision.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def settings(table: str | None, **more: object) -> dict[str, object]:
    """Return what transformers writes. table: of 4-bit weights; None: they have 8 bits."""
    return {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": table is not None,
        "_load_in_8bit": table is None,
        "load_in_4bit": table is not None,
        "load_in_8bit": table is None,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": table or "fp4",
        "bnb_4bit_use_double_quant": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
        **more,
    }


def table_of(name: str) -> npt.NDArray[np.float32]:
    """Return the sixteen values of a 4-bit code."""
    if name == "nf4":
        return np.array(_NF4, np.float32)
    halves = np.array([0, 1 / 16, 8, 12, 4, 6, 2, 3]) / 12
    return np.concatenate([halves, -halves]).astype(np.float32)


def normal_table() -> npt.NDArray[np.float64]:
    """Return NF4 by its definition: quantiles of the normal distribution, scaled to end at 1."""
    quantile, last = NormalDist().inv_cdf, 0.9677083
    above = [quantile(p) for p in np.linspace(last, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(last, 0.5, 8)[:-1]]
    values = np.array(sorted([*above, 0, *below]))
    return values / values.max()


def four_bits(name: str, *, block: int = 64, nested: int = 0, storage: Any = np.uint8) -> Maker:
    """Return a maker of 4-bit matrices. block: weights that share a scale; nested: scales that share another,
    0: scales are numbers; storage: the type that bytes are stored as.
    """

    def make(shape: tuple[int, int], rng: np.random.Generator) -> Made:
        count, table = shape[0] * shape[1], table_of(name)
        codes = rng.integers(0, 16, count, dtype=np.uint8)
        halves = np.pad(codes, (0, count % 2)).reshape(-1, 2)
        state: dict[str, object] = {
            "quant_type": name,
            "blocksize": block,
            "dtype": "bfloat16",
            "shape": list(shape),
        }
        parts, scales = _scales(-(-count // block), width_of(shape[1]), nested, rng)
        if nested:
            state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": _OFFSET}
        blob = np.frombuffer(json.dumps(state).encode(), np.uint8)
        values = table[codes] * np.repeat(scales, block)[:count]
        stored = (halves[:, 0] << np.uint8(4) | halves[:, 1]).view(storage).reshape(-1, 1)
        packed = {"weight": stored, "weight.quant_map": table}
        packed[f"weight.quant_state.bitsandbytes__{name}"] = blob
        return packed | parts, values.reshape(shape)

    return make


_OFFSET = 0.125


def _scales(
    count: int, width: float, nested: int, rng: np.random.Generator
) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.float32]]:
    if not nested:
        scales = rng.uniform(width / 2, width * 2, count).astype(np.float32)
        return {"weight.absmax": scales}, scales
    codes = rng.integers(0, 256, count, dtype=np.uint8)
    table = np.sort(rng.uniform(-0.3, 0.6, 256)).astype(np.float32)
    factors = rng.uniform(width / 4, width, -(-count // nested)).astype(np.float32)
    scales = table[codes] * np.repeat(factors, nested)[:count] + np.float32(_OFFSET)
    parts = {
        "weight.absmax": codes,
        "weight.nested_quant_map": table,
        "weight.nested_absmax": factors,
    }
    return parts, scales


def eight_bits(shape: tuple[int, int], rng: np.random.Generator) -> Made:
    """Make a matrix of 8 bits with the largest of each row."""
    codes = rng.integers(-128, 128, shape, dtype=np.int8)
    width = width_of(shape[1])
    largest = rng.uniform(width, width * 3, shape[0]).astype(np.float32)
    parts = {"weight": codes, "SCB": largest, "weight_format": np.array(0, np.uint8)}
    scales = (largest / np.float32(127))[:, None]
    return parts, codes.astype(np.float32) * scales
