"""Matrices as HQQ stores them in safetensors files, by the definition of its format."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from support.builders.packed_folders import Made, Maker, width_of

SETTINGS: dict[str, object] = {
    "quant_method": "hqq",
    "quant_config": {
        "weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1},
        "scale_quant_params": None,
        "zero_quant_params": None,
        "offload_meta": False,
    },
    "skip_modules": ["lm_head"],
}


def _text(value: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(value.encode(), np.uint8)


def _pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[Any]:
    """Pack rows [n, columns]: a word holds codes that lie a part of the rows apart, the first on top."""
    each, word = (10, np.int32) if bits == 3 else (8 // bits, np.uint8)
    step = -(-len(codes) // each)
    padded = np.zeros((step * each, codes.shape[1]), word)
    padded[: len(codes)] = codes
    found = np.zeros((step, codes.shape[1]), word)
    for place in range(each):
        found |= padded[place * step : (place + 1) * step] << word((each - 1 - place) * bits)
    return found


def matrix(
    bits: int, group: int, *, axis: int = 1, whole: bool = True, low: int = 0, storage: Any = None
) -> Maker:
    """Return a maker. whole: zero points are whole numbers from ``low`` on; storage: floating point that the
    words are stored as.
    """

    def make(shape: tuple[int, int], rng: np.random.Generator) -> Made:
        count = shape[0] * shape[1]
        grid = (count // group, group) if axis == 1 else (group, count // group)
        of_groups = (grid[0], 1) if axis == 1 else (1, grid[1])
        codes = rng.integers(0, 2**bits, grid, dtype=np.uint8)
        zeros = rng.integers(low, 2**bits, of_groups).astype(np.float32)
        if not whole:
            zeros += rng.uniform(-0.5, 0.5, of_groups).astype(np.float32)
        width = 2 * width_of(shape[1]) / 2**bits
        scales = rng.uniform(width / 2, width, of_groups).astype(ml_dtypes.bfloat16)
        stored = zeros.astype(ml_dtypes.bfloat16)
        values = (codes - stored.astype(np.float32)) * scales.astype(np.float32)
        words = _pack(codes, bits)
        parts = {
            "W_q": words if storage is None else words.view(storage),
            "scale": scales,
            "zero": stored,
            "shape": np.array(shape, np.int64),
            "packing": _text("3bit_32" if bits == 3 else f"{bits}bit_u8"),
            "compute_dtype": _text("torch.bfloat16"),
            "unpack_view_dtype": _text("torch.uint8"),
        }
        settings = {"nbits": bits, "group_size": group, "axis": axis}
        flags = ("quant_scale", "quant_zero", "offload_meta")
        parts |= {name: np.array(value, np.int32) for name, value in settings.items()}
        parts |= {name: np.array(0, np.uint8) for name in (*flags, "view_as_float", "channel_wise")}
        on = ("encoded_state_dict", "stores_quant_config", "optimize", "round_zero")
        return parts | {name: np.array(1, np.uint8) for name in on}, values.reshape(shape)

    return make
