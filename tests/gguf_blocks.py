"""Random blocks of every quantised GGUF type, made from bytes: any bit pattern is a block, only scales must be sane."""

from __future__ import annotations

from typing import Final

import gguf
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# Where float16 factors lie in a block, each with its size relative to the first: offsets are near the middle code.
_FACTORS: Final[dict[str, tuple[tuple[int, float], ...]]] = {
    "Q4_0": ((0, 1.0),),
    "Q4_1": ((0, 1.0), (2, -7.5)),
    "Q5_0": ((0, 1.0),),
    "Q5_1": ((0, 1.0), (2, -15.5)),
    "Q8_0": ((0, 1.0),),
    "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q5_K": ((0, 1.0), (2, 15.5)),
    "Q6_K": ((208, 1.0),),
}
SYMMETRIC: Final = ("Q4_0", "Q5_0", "Q8_0", "Q6_K")
AFFINE: Final = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
K_TYPES: Final = ("Q4_K", "Q5_K", "Q6_K")


def random_blocks(kind: str, rows: int, columns: int, *, seed: int, spread: float = 0.3) -> Bytes:
    """Return rows of blocks [rows, bytes of a row] whose weights have a root mean square near ``columns ** -0.5``.

    spread: by how much factors vary from block to block, relative to their size.
    """
    rng = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)

    def with_factors(unit: float) -> Bytes:
        draw = np.random.default_rng(seed + 1)
        for place, ratio in _FACTORS[kind]:
            factors = unit * ratio * (1 + spread * draw.standard_normal(len(blocks)))
            blocks[:, place : place + 2] = factors.astype("<f2")[:, None].view(np.uint8)
        return blocks

    size_now = np.sqrt(np.mean(dequantised(kind, with_factors(0.01)) ** 2))
    return with_factors(0.01 * columns**-0.5 / size_now).reshape(rows, -1)


def dequantised(kind: str, data: Bytes) -> npt.NDArray[np.float32]:
    """Return the weights of rows of blocks, by the gguf package."""
    values: npt.NDArray[np.float32] = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return values
