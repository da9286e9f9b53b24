"""The KV cache in host memory: one key and one value buffer a layer, a row for each slot.

Buffers are ``[slots, kv_heads, capacity, head_dim]`` in the layout's type. The operating system commits their pages when they
are first written, so memory follows use, not capacity.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_serve.errors import ResourceError, UsageError
from llorch_serve.manifest import ComputeType, KvLayout

KV_DTYPES: Final[dict[ComputeType, type[np.generic]]] = {"float32": np.float32, "float16": np.float16}
"""Of numpy, which has no bfloat16; a provider that computes in it keeps its cache on its device."""

MEMORY_SHARE: Final = 0.8
"""Part of the free memory that the KV cache may grow to; the rest is for activations and the system."""


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """Size of the cache.

    limited_by_memory: the context is shorter than the artifact's because memory is short.
    """

    slots: int
    context: int
    bytes_per_token: int
    limited_by_memory: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes if every slot is full."""
        return self.slots * self.context * self.bytes_per_token


def plan_capacity(
    kv: KvLayout, *, slots: int, context_length: int, max_context: int | None, free_bytes: int
) -> KvCapacity:
    """Choose the tokens per slot.

    context_length: the artifact's; max_context: the user's choice, or None for the longest that fits.
    Raises UsageError for values out of range, ResourceError if the choice does not fit ``free_bytes``.
    """
    if slots < 1:
        raise UsageError(f"--slots is {slots}; at least 1 is needed")
    if max_context is not None and not 2 <= max_context <= context_length:
        raise UsageError(f"--max-context is {max_context}; this artifact takes 2 to {context_length}")
    budget = int(free_bytes * MEMORY_SHARE)
    fitting = budget // (slots * kv.bytes_per_token)
    wanted = max_context or context_length
    if fitting >= wanted:
        return KvCapacity(slots, wanted, kv.bytes_per_token)
    if max_context is not None or fitting < 2:
        raise ResourceError(
            f"the KV cache needs {slots} slots x {wanted} tokens x {kv.bytes_per_token} bytes = "
            f"{slots * wanted * kv.bytes_per_token / 2**20:.0f} MiB and {budget / 2**20:.0f} MiB may be used "
            f"({MEMORY_SHARE:.0%} of what is free); choose fewer --slots or a smaller --max-context"
        )
    return KvCapacity(slots, fitting, kv.bytes_per_token, limited_by_memory=True)


class KvCache:
    """The buffers, and copies between slots."""

    def __init__(self, kv: KvLayout, capacity: KvCapacity) -> None:
        self.capacity = capacity
        shape = (capacity.slots, kv.kv_heads, capacity.context, kv.head_dim)
        self.dtype = KV_DTYPES[kv.dtype]
        self._buffers = {
            (layer, kind): _lazy_zeros(shape, self.dtype, capacity)
            for layer in range(kv.layers)
            for kind in ("key", "value")
        }

    def rows(self, layer: int, kind: str, first: int, count: int) -> npt.NDArray[np.generic]:
        """Return the view [count, kv_heads, capacity, head_dim] of neighbouring slots."""
        return self._buffers[layer, kind][first : first + count]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` positions of one slot to another."""
        for buffer in self._buffers.values():
            buffer[target, :, :tokens] = buffer[source, :, :tokens]


def _lazy_zeros(
    shape: tuple[int, int, int, int], dtype: type[np.generic], capacity: KvCapacity
) -> npt.NDArray[np.generic]:
    """Return zeros whose memory is committed page by page as it is written.

    numpy's own allocation asks the kernel for huge pages of 2 MiB, which commits a head's whole row of positions
    with its first token. Raises ResourceError if the system refuses the address space.
    """
    try:
        memory = mmap.mmap(-1, math.prod(shape) * np.dtype(dtype).itemsize)
    except OSError as error:
        raise ResourceError(
            f"the system refuses {capacity.total_bytes / 2**20:.0f} MiB of address space for the KV cache "
            f"({error.strerror}); choose fewer --slots or a smaller --max-context"
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)
