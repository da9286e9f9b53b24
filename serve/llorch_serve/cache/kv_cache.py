"""The KV cache in host memory: one key and one value buffer a layer, a row for each slot.

Buffers are ``[slots, kv_heads, capacity, head_dim]`` in the layout's type. The operating system commits their
pages when they are first written, and takes them back when they are released, so memory follows use, not
capacity.
"""

from __future__ import annotations

import math
import mmap
import sys
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from llorch_serve.artifact.manifest import KvDtype, KvLayout
from llorch_serve.errors import ResourceError, UsageError

KV_DTYPES: Final[dict[KvDtype, type[np.generic]]] = {
    "float32": np.float32,
    "float16": np.float16,
    "int8": np.int8,
}
"""Of numpy, which has no bfloat16; a provider that computes in it keeps its cache on its device."""

MEMORY_SHARE: Final = 0.8
"""Part of the free memory that the KV cache may grow to; the rest is for activations and the system."""


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """Size of the cache.

    context: tokens that one slot may hold. budget: tokens that all slots together may hold.
    limited_by_memory: the context is shorter than the artifact's because memory is short.
    """

    slots: int
    context: int
    bytes_per_token: int
    budget: int
    limited_by_memory: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes if the budget is used up."""
        return self.budget * self.bytes_per_token

    @property
    def reserved_bytes(self) -> int:
        """Address space of the buffers: every slot at its longest."""
        return self.slots * self.context * self.bytes_per_token

    def notice(self, context_length: int) -> str | None:
        """Return what a person should know, with the arithmetic; context_length: the longest that the model
        has.
        """
        arithmetic = (
            f"share {self.budget} tokens of {self.bytes_per_token} bytes each in "
            f"{self.total_bytes / 2**20:.0f} MiB of KV cache"
        )
        if self.limited_by_memory:
            return (
                f"context limited to {self.context} of {context_length} tokens: {self.slots} slots "
                f"{arithmetic}"
            )
        if self.budget < self.slots * self.context:
            return (
                f"{self.slots} slots of {self.context} tokens {arithmetic}; a request waits until its "
                f"prompt and "
                "max_tokens fit"
            )
        return None


def plan_capacity(
    kv: KvLayout,
    *,
    slots: int,
    context_length: int,
    max_context: int | None,
    free_bytes: int,
    cache_bytes: int | None = None,
    whole: bool = False,
) -> KvCapacity:
    """Choose the tokens per slot and over all slots.

    context_length: the artifact's. max_context: the user's choice; None: the longest that every slot can have
        at once.
    A choice may be longer than that: then fewer sequences of full length run at a time.
    cache_bytes: memory for the cache; None: a share of ``free_bytes``.
    whole: the memory of all slots is taken at once, so it has to suffice for each at its longest.
    Raises UsageError for values out of range, ResourceError if one sequence of the chosen length, or with
    ``whole`` one in every slot, does not fit.
    """
    if slots < 1:
        raise UsageError(f"--slots is {slots}; at least 1 is needed")
    if max_context is not None and not 2 <= max_context <= context_length:
        raise UsageError(f"--max-context is {max_context}; this artifact takes 2 to {context_length}")
    if cache_bytes is not None and cache_bytes > free_bytes:
        raise ResourceError(
            f"--kv-cache-memory is {cache_bytes / 2**20:.0f} MiB and {free_bytes / 2**20:.0f} MiB are free "
            f"beside the "
            "weights; choose less"
        )
    allowed = int(free_bytes * MEMORY_SHARE) if cache_bytes is None else cache_bytes
    budget = allowed // kv.bytes_per_token
    fitting = budget // slots
    if max_context is None and 2 <= fitting < context_length:
        return KvCapacity(slots, fitting, kv.bytes_per_token, fitting * slots, limited_by_memory=True)
    wanted = max_context or context_length
    sequences = slots if whole else 1
    if budget < sequences * wanted:
        share = f"{MEMORY_SHARE:.0%} of what is free" if cache_bytes is None else "--kv-cache-memory"
        each = f"{slots} slots of {wanted} tokens" if whole else f"one sequence of {wanted} tokens"
        raise ResourceError(
            f"{each} x {kv.bytes_per_token} bytes {'need' if whole else 'needs'} "
            f"{sequences * wanted * kv.bytes_per_token / 2**20:.1f} MiB of KV cache and "
            f"{allowed / 2**20:.1f} MiB may be used "
            f"({share}); choose a smaller --max-context{' or fewer --slots' if whole else ''}"
        )
    return KvCapacity(slots, wanted, kv.bytes_per_token, min(budget, slots * wanted))


class SlotCache(Protocol):
    """What a session needs of a cache, wherever it is; see :class:`KvCache` for the methods."""

    @property
    def kv(self) -> KvLayout:
        """The names and shape of its tensors."""

    @property
    def capacity(self) -> KvCapacity:
        """Slots and their length."""

    @property
    def stays_bound(self) -> bool:
        """Whether it is bound to a graph once, rather than before every call."""

    @property
    def takes_batches(self) -> bool:
        """Whether one call takes a token of each of several slots."""

    def place(self, first: int, count: int) -> tuple[int, int]:
        """Return what tells the buffers of neighbouring slots from all others."""

    def bind(self, io: Any, first: int, count: int) -> None:
        """Bind neighbouring slots as past and present of a call."""

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first positions of one slot to another."""

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Exchange the first positions of two slots."""

    def release(self, slot: int, keep: int) -> None:
        """Give memory beyond the first positions back to the system, where that can be done."""


class KvCache:
    """The buffers, and edits of slots. A slot's positions are those of all layers, keys and values."""

    stays_bound = False
    takes_batches = True

    def __init__(self, kv: KvLayout, capacity: KvCapacity) -> None:
        self.kv = kv
        self.capacity = capacity
        shape = (capacity.slots, kv.kv_heads, capacity.context, kv.head_dim)
        self.dtype = KV_DTYPES[kv.dtype]
        places = [(layer, kind) for layer in range(kv.layers) for kind in ("key", "value")]
        size = math.prod(shape) * np.dtype(self.dtype).itemsize
        self._memory = [_lazy_memory(size, capacity) for _ in places]
        self._buffers = {
            place: np.frombuffer(memory, self.dtype).reshape(shape)
            for place, memory in zip(places, self._memory, strict=True)
        }

    def rows(self, layer: int, kind: str, first: int, count: int) -> npt.NDArray[np.generic]:
        """Return the view [count, kv_heads, capacity, head_dim] of neighbouring slots."""
        return self._buffers[layer, kind][first : first + count]

    def place(self, first: int, count: int) -> tuple[int, int]:
        """Return what tells the buffers of neighbouring slots from all others: a slot's stay where they
        are.
        """
        return (first, count)

    def bind(self, io: Any, first: int, count: int) -> None:
        """Bind neighbouring slots as past and present of a call. io: onnxruntime's binding."""
        for layer in range(self.kv.layers):
            for kind in ("key", "value"):
                rows = self.rows(layer, kind, first, count)
                place = ("cpu", 0, self.dtype, rows.shape, rows.ctypes.data)
                io.bind_input(self.kv.past_name.format(layer=layer, kind=kind), *place)
                io.bind_output(self.kv.present_name.format(layer=layer, kind=kind), *place)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` positions of one slot to another."""
        for buffer in self._buffers.values():
            buffer[target, :, :tokens] = buffer[source, :, :tokens]

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Exchange the first ``tokens`` positions of two slots."""
        for buffer in self._buffers.values():
            kept = buffer[first, :, :tokens].copy()
            buffer[first, :, :tokens] = buffer[second, :, :tokens]
            buffer[second, :, :tokens] = kept

    def release(self, slot: int, keep: int) -> None:
        """Give whole pages beyond the first ``keep`` positions back to the system; they read as zeros
        afterwards.
        """
        # Windows has no such call: there memory stays at the most that was used.
        if sys.platform != "win32":
            for memory, buffer in zip(self._memory, self._buffers.values(), strict=True):
                row = buffer.strides[1]
                for head in range(buffer.shape[1]):
                    start = slot * buffer.strides[0] + head * row
                    first = -(-(start + keep * buffer.strides[2]) // mmap.PAGESIZE) * mmap.PAGESIZE
                    end = (start + row) // mmap.PAGESIZE * mmap.PAGESIZE
                    if end > first:
                        memory.madvise(mmap.MADV_DONTNEED, first, end - first)


def _lazy_memory(size: int, capacity: KvCapacity) -> mmap.mmap:
    """Return ``size`` zero bytes whose memory is committed page by page as it is written.

    numpy's own allocation asks the kernel for huge pages of 2 MiB, which commits a head's whole row of
    positions with its first token. Raises ResourceError if the system refuses the address space.
    """
    try:
        if sys.platform == "win32":  # the page file answers for all of it; memory is taken page by page
            memory = mmap.mmap(-1, size)
        else:  # private, since the pages of a shared mapping are not given back by MADV_DONTNEED
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ResourceError(
            f"the system refuses {capacity.reserved_bytes / 2**20:.0f} MiB of address space for the KV cache "
            f"({error.strerror}); choose fewer --slots or a smaller --max-context"
        ) from error
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
