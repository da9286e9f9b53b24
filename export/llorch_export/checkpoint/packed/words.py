"""Codes out of words of 32 bits, the lowest bits first, as GPTQ, AWQ and compressed-tensors pack them; out of
words that hold codes of rows far apart, as HQQ and quanto do; and out of numbers around zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_serve.errors import ArtifactError

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
    periods = -(-count // 32)  # of 32 codes, which take as many words as a code has bits
    padded = np.pad(stream, ((0, 0), (0, periods * bits - stream.shape[1])))
    whole = padded.reshape(len(stream), periods, bits)
    codes = np.empty((len(stream), periods, 32), np.uint8)
    for place in range(32):
        first, shift = divmod(place * bits, 32)
        part = whole[:, :, first] >> np.uint32(shift)
        if shift + bits > 32:
            part |= whole[:, :, first + 1] << np.uint32(32 - shift)
        codes[:, :, place] = part & np.uint32(2**bits - 1)
    return codes.reshape(len(stream), -1)[:, :count]


def around_zero(numbers: npt.NDArray[np.generic], bits: int, place: StoredArray) -> Bytes:
    """Return numbers around zero as codes from zero on. place: where they lie. Raises ArtifactError if one is
    out of range.
    """
    half = 2 ** (bits - 1)
    low, high = int(numbers.min()), int(numbers.max())
    if low < -half or high >= half:
        raise ArtifactError(
            f"{place.path}: tensor {place.name} holds {low} to {high}, expected numbers of {bits} bits, "
            f"from {-half} to {half - 1}; the file is damaged or its config belongs to another "
            "model, fetch both again"
        )
    return numbers.astype(np.uint8) + np.uint8(half)


def strided_codes(
    words: StoredArray,
    bits: int,
    shifts: Sequence[int],
    rows: tuple[int, int],
    columns: tuple[int, int] | None = None,
) -> Bytes:
    """Return rows of codes; a word holds codes that lie as many rows apart as there are rows of words.

    words: [step, columns]; the code of row ``r`` lies in row ``r % step``, ``shifts[r // step]`` bits up.
    rows: from and to (excluded). columns: likewise, of one row; None: all of them.
    """
    step, wide = words.shape
    left, right = columns or (0, wide)
    flat, parts, (row, bottom) = replace(words, shape=(step * wide,)), [], rows
    while row < bottom:
        place = row // step
        end = min(bottom, (place + 1) * step)
        first, last = ((one - place * step) * wide for one in (row, end - 1))
        stored: npt.NDArray[np.int64] = flat.rows(first + left, last + right).astype(np.int64)
        codes = (stored >> shifts[place] & (2**bits - 1)).astype(np.uint8)
        parts.append(codes.reshape(end - row, right - left))
        row = end
    return np.concatenate(parts)
