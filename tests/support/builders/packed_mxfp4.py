"""A tiny gpt-oss as it is published: experts in MXFP4, drawn at random, all else in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from support.builders.packed_checkpoints import Packed, start

SETTINGS = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def write_mxfp4(path: Path, overrides: dict[str, Any]) -> Packed:
    """Write a folder of the family; its values are those of transformers' modules, [experts, in, out]."""
    packed = start(path, overrides)
    rng = np.random.default_rng(7)
    for name, value in packed.values.items():
        if value.ndim != 3:
            packed.stored[name] = value.astype(ml_dtypes.bfloat16)
            packed.values[name] = packed.stored[name].astype(np.float32)
            continue
        blocks, scales, values = _drawn(value.swapaxes(1, 2).shape, rng)
        del packed.stored[name]
        packed.stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        packed.values[name] = np.ascontiguousarray(values.swapaxes(1, 2))
    packed.config |= {"quantization_config": SETTINGS, "torch_dtype": "bfloat16"}
    packed.rewrite()
    return packed


def _drawn(
    shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Return blocks, scales and values of a stack [experts, out, in]."""
    experts, rows, columns = shape
    codes = rng.integers(0, 16, (experts, rows, columns // 32, 32), dtype=np.uint8)
    scales = rng.integers(123, 126, codes.shape[:3], dtype=np.uint8)
    signs = np.where(codes >= 8, -1, 1)
    values = signs * E2M1[codes % 8] * np.exp2(scales.astype(np.float32) - 127)[..., None]
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, scales, values.reshape(shape).astype(np.float32)
