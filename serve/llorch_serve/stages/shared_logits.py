"""Memory that the process of the last stage writes logits to and the worker reads them from.

Logits are the largest of what crosses: a vocabulary of 100,000 takes 400 kB a row, which a socket copies
twice and in many pieces. They are written before the message that tells of them, and read before the next
call.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Sequence

import numpy as np

from llorch_serve.runtime.bound_graph import Logits


def make_memory(size: int) -> int | None:
    """Return a descriptor of memory that processes can share; None where the system has none without a
    name.

    Its pages are taken as they are written.
    """
    descriptor: int | None = None
    if sys.platform == "linux":
        descriptor = os.memfd_create("llorch-logits")
        os.ftruncate(descriptor, size)
    return descriptor


def map_logits(descriptor: int) -> Logits:
    """Return the memory behind a descriptor, which is closed, as float32 numbers."""
    try:
        return np.frombuffer(mmap.mmap(descriptor, 0), np.float32)
    finally:
        os.close(descriptor)


def lies_in(rows: np.ndarray, memory: Logits | None) -> bool:
    """Tell whether an array is the beginning of shared memory."""
    return memory is not None and rows.flags.c_contiguous and rows.ctypes.data == memory.ctypes.data


def beginning(memory: Logits, shape: Sequence[int]) -> Logits:
    """Return the beginning of shared memory as an array. Raises ValueError if it is too short."""
    count = math.prod(shape)
    if count > len(memory):
        raise ValueError(f"an array {list(shape)} in shared memory of {len(memory)} numbers")
    return memory[:count].reshape(shape)
