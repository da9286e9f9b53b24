"""Blocks of quantised GGUF types, without llama.cpp.

Random ones of every type are made from bytes: any bit pattern is a block, only scales must be sane. K types
are also made from weights, by plain rounding.
"""

from __future__ import annotations

from typing import Final

import gguf
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# Where float16 factors lie in a block, each with its size relative to the first: offsets are near the middle
# code.
_FACTORS: Final[dict[str, tuple[tuple[int, float], ...]]] = {
    "Q4_0": ((0, 1.0),),
    "Q4_1": ((0, 1.0), (2, -7.5)),
    "Q5_0": ((0, 1.0),),
    "Q5_1": ((0, 1.0), (2, -15.5)),
    "Q8_0": ((0, 1.0),),
    "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q5_K": ((0, 1.0), (2, 15.5)),
    "Q6_K": ((208, 1.0),),
    "Q2_K": ((80, 1.0), (82, 1.5)),
    "Q3_K": ((108, 1.0),),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), ((0, 1.0),)),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "Q1_0", "Q2_0"), ((0, 1.0),)),
    "TQ1_0": ((52, 1.0),),
    "TQ2_0": ((64, 1.0),),
    # The factor is spread over other fields: see _spread_factors.
    **dict.fromkeys(("IQ1_M", "MXFP4", "NVFP4"), ()),
}
SYMMETRIC: Final = ("Q4_0", "Q5_0", "Q8_0", "Q6_K")
AFFINE: Final = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
INTEGER: Final = (
    "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0", "Q2_0",
)  # fmt: skip
# gguf cannot read these yet: ggml's number, weights of a block, its bytes.
NEWEST: Final = {"Q1_0": (41, 128, 18), "Q2_0": (42, 64, 18)}
K_TYPES: Final = ("Q4_K", "Q5_K", "Q6_K")


def random_blocks(kind: str, rows: int, columns: int, *, seed: int, spread: float = 0.3) -> Bytes:
    """Return rows of blocks [rows, bytes of a row] whose weights have a root mean square near ``columns **
    -0.5``.

    spread: by how much factors vary from block to block, relative to their size.
    """
    rng = np.random.default_rng(seed)
    elements, size = block_size(kind)
    blocks = rng.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)

    def with_factors(unit: float) -> Bytes:
        draw = np.random.default_rng(seed + 1)
        for place, ratio in _FACTORS[kind]:
            factors = unit * ratio * (1 + spread * draw.standard_normal(len(blocks)))
            blocks[:, place : place + 2] = factors.astype("<f2")[:, None].view(np.uint8)
        _spread_factors(kind, blocks, unit * (1 + spread * draw.standard_normal(len(blocks))))
        return blocks

    size_now = np.sqrt(np.mean(dequantised(kind, with_factors(0.01)) ** 2))
    return with_factors(0.01 * columns**-0.5 / size_now).reshape(rows, -1)


def _spread_factors(kind: str, blocks: Bytes, factors: npt.NDArray[np.float64]) -> None:
    """Write the factors of types that have them neither in one piece nor as float16."""
    if kind == "IQ1_M":  # four bits of a float16 in the upper half of every second byte
        bits = factors.astype("<f2").view("<u2")
        for number in range(4):
            place = 49 + 2 * number
            blocks[:, place] = blocks[:, place] & 15 | (bits >> 4 * number & 15) << 4
    elif kind == "MXFP4":  # an exponent
        blocks[:, 0] = 128 + np.floor(np.log2(np.abs(factors)))
    elif kind == "NVFP4":  # four small floats without a sign: exponent and three bits
        blocks[:, :4] = blocks[:, :4] & 7 | 1 << 3


def dequantised(kind: str, data: Bytes) -> npt.NDArray[np.float32]:
    """Return the weights of rows of blocks, by the gguf package, or as ggml defines what that cannot read."""
    if kind in NEWEST:
        return np.array([_newest(kind, row) for row in data], np.float32)
    values: npt.NDArray[np.float32] = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return values


def storage_type(kind: str) -> int:
    """Return ggml's number of a type, of which gguf's writer then knows the size."""
    if kind not in NEWEST:
        return int(gguf.GGMLQuantizationType[kind])
    number, *size = NEWEST[kind]
    gguf.GGML_QUANT_SIZES.setdefault(number, tuple(size))
    return number


def block_size(kind: str) -> tuple[int, int]:
    """Return the weights of a block and its bytes."""
    if kind in NEWEST:
        return NEWEST[kind][1:]
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return elements, size


def _newest(kind: str, row: Bytes) -> list[float]:
    """One weight after the other: bits from the lowest, around zero (Q1_0) or from -1 to 2 (Q2_0)."""
    weights = []
    bits = 1 if kind == "Q1_0" else 2
    for block in row.reshape(-1, 18):
        scale = float(block[:2].view("<f2")[0])
        for byte in block[2:].tolist():
            for place in range(0, 8, bits):
                code = byte >> place & (2**bits - 1)
                weights.append((2 * code - 1 if bits == 1 else code - 1) * scale)
    return weights


def encoded(kind: str, weights: npt.NDArray[np.float32]) -> Bytes:
    """Return weights [rows, columns] in blocks of a K type, each sub-block rounded to the nearest of its
    range.
    """
    return {"Q4_K": _affine_k, "Q5_K": _affine_k, "Q6_K": _q6_k}[kind](kind, weights)


def _affine_k(kind: str, weights: npt.NDArray[np.float32]) -> Bytes:
    """8 sub-blocks of 32 with a 6-bit step and a 6-bit offset each."""
    top = {"Q4_K": 15, "Q5_K": 31}[kind]
    parts = weights.reshape(-1, 8, 32)
    low, high = np.minimum(parts.min(2), 0), parts.max(2)
    step_unit, steps = _six_bits((high - low) / top)
    offset_unit, offsets = _six_bits(-low)
    step, offset = (
        unit.astype(np.float32) * found for unit, found in ((step_unit, steps), (offset_unit, offsets))
    )
    codes = np.rint((parts + offset[..., None]) / np.maximum(step, 1e-30)[..., None])
    codes = codes.clip(0, top).astype(np.uint8)
    nibbles = codes & 15
    pieces = [
        step_unit.astype("<f2").view(np.uint8),
        offset_unit.astype("<f2").view(np.uint8),
        steps[:, :4] | (steps[:, 4:] >> 4) << 6,
        offsets[:, :4] | (offsets[:, 4:] >> 4) << 6,
        steps[:, 4:] & 15 | (offsets[:, 4:] & 15) << 4,
    ]
    if kind == "Q5_K":
        fifth = (codes >> 4) << np.arange(8, dtype=np.uint8)[:, None]
        pieces.append(np.bitwise_or.reduce(fifth, axis=1))
    pieces.append((nibbles[:, 0::2] | nibbles[:, 1::2] << 4).reshape(len(parts), 128))
    return np.concatenate(pieces, axis=1).reshape(len(weights), -1)


def _q6_k(kind: str, weights: npt.NDArray[np.float32]) -> Bytes:
    """16 sub-blocks of 16 with a signed 8-bit scale each."""
    parts = weights.reshape(-1, 16, 16)
    wanted = np.abs(parts).max(2) / 31
    unit = (wanted.max(1, keepdims=True) / 127).astype("<f2")
    scales = np.rint(wanted / np.maximum(unit.astype(np.float32), 1e-30)).clip(0, 127)
    scale = np.maximum(unit * scales, 1e-30).astype(np.float32)
    codes = (np.rint(parts / scale[..., None]).clip(-32, 31) + 32).astype(np.uint8)
    halves, quarters = codes.reshape(-1, 2, 2, 64) & 15, codes.reshape(-1, 2, 4, 32) >> 4
    pairs = np.bitwise_or.reduce(quarters << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2)
    pieces = [
        (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(-1, 128),
        pairs.reshape(-1, 64),
        scales.astype(np.int8).view(np.uint8),
        unit.view(np.uint8),
    ]
    return np.concatenate(pieces, axis=1).reshape(len(weights), -1)


def _six_bits(wanted: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float16], Bytes]:
    """Return a float16 unit [n, 1] and the multiples of it [n, 8] that are nearest to what is wanted."""
    unit = (wanted.max(1, keepdims=True) / 63).astype("<f2")
    multiples = np.rint(wanted / np.maximum(unit.astype(np.float32), 1e-30)).clip(0, 63)
    return unit, multiples.astype(np.uint8)
