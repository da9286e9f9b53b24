"""Codes out of words of 32 bits, the lowest bits first, as GPTQ, AWQ and compressed-tensors pack them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def words_of(codes: int, bits: int) -> int:
    """Return how many words hold so many codes, packed without gaps."""
    return -(-codes * bits // 32)


def unpacked(words: npt.NDArray[np.generic], bits: int, count: int) -> Bytes:
    """Return codes [rows, count] of words [rows, words_of(count, bits)], of any type of 32 bits.

    bits: up to 8; a code may lie across two words.
    """
    stream = np.ascontiguousarray(words).view("<u4")
    if bits == 8:
        return stream.view(np.uint8)[:, :count]
    if 32 % bits == 0:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        found = (stream[..., None] >> shifts & np.uint32(2**bits - 1)).astype(np.uint8)
        return found.reshape(len(stream), -1)[:, :count]
    starts = np.arange(count) * bits
    first, shift = starts // 32, (starts % 32).astype(np.uint64)
    padded = np.pad(stream, ((0, 0), (0, 1))).astype(np.uint64)
    pairs = padded[:, first] | padded[:, first + 1] << np.uint64(32)
    return (pairs >> shift & np.uint64(2**bits - 1)).astype(np.uint8)
