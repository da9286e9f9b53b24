"""The KV cache in a device's memory whose buffers can be divided by address: a key and a value buffer a
layer, for all slots.

So one call advances many sequences, as in host memory. The buffers are taken whole when they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llorch_serve.artifact.manifest import KvLayout
from llorch_serve.cache.device_buffers import ELEMENT_TYPES, DeviceBuffers
from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.providers.device_memory import DeviceMemory
from llorch_serve.providers.recording_turns import TURNS


class SharedDeviceCache:
    """The buffers, [slots, kv_heads, capacity, head_dim] each, and edits of slots.

    buffers: makes them. memory: the device's. ends: for each slot, how many of its positions may still be
        read: those that the last call on it, copy or exchange left. What follows is written before it is
        read.
    Raises ResourceError if the device has too little memory, ProviderError if it gave memory elsewhere.
    """

    stays_bound = True
    takes_batches = True

    def __init__(
        self, kv: KvLayout, capacity: KvCapacity, buffers: DeviceBuffers, memory: DeviceMemory
    ) -> None:
        self.kv = kv
        self.capacity = capacity
        self.memory = memory
        self.ends = [0] * capacity.slots
        self._buffers = buffers
        self._element = ELEMENT_TYPES[kv.dtype]
        self._position = kv.bytes_per_token // (2 * kv.layers * kv.kv_heads)
        self._head = capacity.context * self._position
        self._slot = kv.kv_heads * self._head
        self._values = [self._make(capacity.slots) for _ in range(2 * kv.layers)]
        self._spare = self._make(1)  # of one layer; slots are exchanged by way of it

    def place(self, first: int, count: int) -> tuple[int, int]:
        """Return what tells the buffers of neighbouring slots from all others: a slot's stay where they
        are.
        """
        return (first, count)

    def bind(self, io: Any, first: int, count: int) -> None:
        """Bind neighbouring slots as past and present of a call. io: onnxruntime's binding."""
        values = iter(self._values)
        for layer in range(self.kv.layers):
            for kind in ("key", "value"):
                address = next(values).data_ptr() + first * self._slot
                part = self._buffers.part(self._shape(count), self._element, address)
                io.bind_input(self.kv.past_name.format(layer=layer, kind=kind), *part)
                io.bind_output(self.kv.present_name.format(layer=layer, kind=kind), *part)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` positions of one slot to another. Raises ProviderError if the device
        fails.
        """
        with TURNS.call():
            for value in self._values:
                start = value.data_ptr()
                self._move(start + target * self._slot, start + source * self._slot, tokens)
            self.memory.wait()
        self.ends[target] = tokens

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Exchange the first ``tokens`` positions of two slots. Raises ProviderError if the device fails."""
        spare = self._spare.data_ptr()
        with TURNS.call():
            for value in self._values:
                one, other = (value.data_ptr() + slot * self._slot for slot in (first, second))
                for target, source in ((spare, one), (one, other), (other, spare)):
                    self._move(target, source, tokens)
            self.memory.wait()
        self.ends[first], self.ends[second] = self.ends[second], self.ends[first]

    def release(self, slot: int, keep: int) -> None:
        """Nothing is given back, as the buffers are whole; what follows ``keep`` is not read again."""
        self.ends[slot] = min(self.ends[slot], keep)

    def written(self, first: int, lengths: Sequence[int]) -> None:
        """Take note that calls have written neighbouring slots up to these lengths."""
        self.ends[first : first + len(lengths)] = lengths

    def _move(self, target: int, source: int, tokens: int) -> None:
        width = tokens * self._position
        self.memory.copy(target, source, rows=self.kv.kv_heads, width=width, pitch=self._head)

    def _make(self, slots: int) -> Any:
        size = self.capacity.reserved_bytes / 2**20
        what = f"a KV cache of {size:.0f} MiB, {self.capacity.slots} slots of {self.capacity.context} tokens"
        return self._buffers.make(self._shape(slots), self._element, what)

    def _shape(self, slots: int) -> tuple[int, ...]:
        return (slots, self.kv.kv_heads, self.capacity.context, self.kv.head_dim)
