"""The KV cache in a device's memory: one key and one value buffer a layer for each slot.

For devices whose buffers cannot be divided by address: a slot takes model calls of its own. Its buffers are
allocated when it is first used, at its whole length, and stay.
"""

from __future__ import annotations

from typing import Any

from llorch_serve.artifact.manifest import KvLayout
from llorch_serve.cache.device_buffers import ELEMENT_TYPES, DeviceBuffers
from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.errors import ProviderError
from llorch_serve.providers import ActiveProvider


class DeviceCache:
    """The buffers, and edits of slots. Every buffer is [1, kv_heads, capacity, head_dim].

    runtime: onnxruntime. provider: whose device it is.
    """

    stays_bound = True
    takes_batches = False

    def __init__(self, kv: KvLayout, capacity: KvCapacity, runtime: Any, provider: ActiveProvider) -> None:
        self.kv = kv
        self.capacity = capacity
        self._runtime = runtime
        self._provider = provider
        self._make = DeviceBuffers(runtime, provider)
        self._buffers: dict[int, list[Any]] = {}  # by number; layer by layer, key and value
        self._number = list(range(capacity.slots))  # of the buffers that a slot has

    def place(self, first: int, count: int) -> tuple[int, int]:
        """Return what tells the buffers of a slot from all others. ``count`` is 1."""
        assert count == 1, "a device's slot takes a call of its own"
        return (self._number[first], 1)

    def bind(self, io: Any, first: int, count: int) -> None:
        """Bind a slot's buffers as past and present of a call.

        Raises ResourceError if the device has no memory left, ProviderError if it gave memory elsewhere.
        """
        number, _ = self.place(first, count)
        values = iter(self._of(number))
        for layer in range(self.kv.layers):
            for kind in ("key", "value"):
                value = next(values)
                io.bind_ortvalue_input(self.kv.past_name.format(layer=layer, kind=kind), value)
                io.bind_ortvalue_output(self.kv.present_name.format(layer=layer, kind=kind), value)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy a slot to another, on the device; ``tokens`` does not matter, as whole buffers are copied.

        Raises ResourceError if the device has no memory left, ProviderError if the runtime fails.
        """
        pairs = (self._of(self._number[source]), self._of(self._number[target]))
        try:
            if self._provider.devices:
                self._runtime.copy_tensors(*pairs)
                return
            for value, over in zip(*pairs, strict=True):
                over.update_inplace(value)
        except Exception as error:  # the runtime's own classes of errors share no narrower base
            raise ProviderError(
                f"the runtime failed to copy a sequence's cache: {' '.join(str(error).split())[:200]}"
            ) from error

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Exchange two slots, which exchanges their buffers, however many ``tokens`` they hold."""
        self._number[first], self._number[second] = self._number[second], self._number[first]

    def release(self, slot: int, keep: int) -> None:
        """Nothing is given back: a device's buffers are whole."""

    def _of(self, number: int) -> list[Any]:
        if number not in self._buffers:
            self._buffers[number] = [self._allocate() for _ in range(2 * self.kv.layers)]
        return self._buffers[number]

    def _allocate(self) -> Any:
        shape = (1, self.kv.kv_heads, self.capacity.context, self.kv.head_dim)
        what = f"the cache of one more sequence of {self.capacity.context} tokens"
        return self._make.make(shape, ELEMENT_TYPES[self.kv.dtype], what)
