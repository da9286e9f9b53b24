"""A session on a graph that appends to one buffer of keys and values, its past and its present at once.

Such a graph counts each row's tokens by its attention mask, so rows of different lengths share a call, and a
prompt may come in parts: what llorch's own graphs do, told in another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llorch_serve.artifact.manifest import KvLayout
from llorch_serve.cache.kv_cache import KvCache, KvCapacity
from llorch_serve.engine.capabilities import Capabilities
from llorch_serve.errors import ProviderError
from llorch_serve.foreign.graph import LoadedGraph
from llorch_serve.foreign.model import ForeignModel

Logits = npt.NDArray[np.float32]
_Array = npt.NDArray[np.generic]


class SharedSession:
    """Runs prefill chunks and decode steps on the slots of its KV cache. Not thread-safe."""

    def __init__(self, model: ForeignModel, graph: LoadedGraph, capacity: KvCapacity) -> None:
        self.capacity = capacity
        self.placement = graph.placement
        self.capabilities = Capabilities(
            batch_invariant=False,  # the folder does not say what its weights are stored in
            chosen_logits=graph.last_logits,
            prompt_logits=not graph.last_logits,
            drafts=not graph.last_logits,
        )
        self._graph = graph
        self._names = model.names
        self._layers = model.manifest.model.layers
        self._vocab_size = model.manifest.model.vocab_size
        self._cache = KvCache(layout(model), capacity)
        self._bindings: dict[tuple[int, int], Any] = {}
        self._logits = np.empty(0, graph.logits_type)

    def prefill(
        self, slot: int, token_ids: Sequence[int], start: int, wanted: Sequence[int] | None = None
    ) -> Logits:
        """See :meth:`llorch_serve.runtime.session.DecoderSession.prefill`."""
        ids = np.array([token_ids], self._graph.ids_type)
        logits = self._run(slot, ids, [start + len(token_ids)])[0]
        return _single(logits[-1:] if wanted is None else logits[list(wanted)])

    def decode(self, token_ids: Sequence[int], lengths: Sequence[int]) -> Logits:
        """See :meth:`llorch_serve.runtime.session.DecoderSession.decode`."""
        ids = np.array(token_ids, self._graph.ids_type)[:, None]
        return _single(self._run(0, ids, lengths)[:, 0])

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        """Copy the keys and values of the first ``tokens`` positions to another slot."""
        self._cache.copy(source, target, tokens)

    def swap_slots(self, first: int, second: int, tokens: int) -> None:
        """Exchange the keys and values of the first ``tokens`` positions of two slots."""
        self._cache.swap(first, second, tokens)

    def release_slot(self, slot: int, keep: int) -> None:
        """Give the memory behind a slot's positions from ``keep`` on back to the system."""
        self._cache.release(slot, keep)

    def verify(self, slot: int, token_ids: Sequence[int], start: int) -> Logits:
        """See :meth:`llorch_serve.runtime.session.DecoderSession.verify`."""
        return self.prefill(slot, token_ids, start, range(len(token_ids)))

    def _run(self, first: int, ids: _Array, lengths: Sequence[int]) -> _Array:
        """Run ids [rows, tokens] in the slots from ``first``; return logits [rows, logits_rows, vocabulary].

        lengths: tokens of each slot, the new ones included.
        """
        rows, tokens = ids.shape
        io = self._binding(first, rows)
        ends = np.array(lengths)
        mask = (np.arange(ends.max()) < ends[:, None]).astype(self._graph.mask_type)
        inputs = {self._names.input_ids: ids, self._names.attention_mask: mask}
        if self._graph.positions_type is not None:
            positions = ends[:, None] - tokens + np.arange(tokens)
            inputs[self._names.position_ids] = positions.astype(self._graph.positions_type)
        for name, array in inputs.items():
            io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        shape = (rows, self._graph.logits_rows(tokens), self._vocab_size)
        logits = self._buffer(shape[0] * shape[1]).reshape(shape)
        io.bind_output(self._names.logits, "cpu", 0, logits.dtype.type, logits.shape, logits.ctypes.data)
        try:
            self._graph.session.run_with_iobinding(io)
        except Exception as error:  # the runtime's own classes of errors share no narrower base
            raise ProviderError(
                f"the runtime failed in a step: {str(error).strip().splitlines()[0]}"
            ) from error
        return logits

    def _binding(self, first: int, count: int) -> Any:
        io = self._bindings.get((first, count))
        if io is None:
            io = self._bindings[first, count] = self._graph.session.io_binding()
            for layer in range(self._layers):
                pairs = zip(self._names.past(layer), self._names.present(layer), strict=True)
                for kind, (past, present) in zip(("key", "value"), pairs, strict=True):
                    buffer = self._cache.rows(layer, kind, first, count)
                    place = ("cpu", 0, buffer.dtype.type, buffer.shape, buffer.ctypes.data)
                    io.bind_input(past, *place)
                    io.bind_output(present, *place)
        return io

    def _buffer(self, rows: int) -> _Array:
        """Return room for so many rows of logits, the same memory in every call."""
        if rows * self._vocab_size > self._logits.size:
            self._logits = np.empty(rows * self._vocab_size, self._graph.logits_type)
        return self._logits[: rows * self._vocab_size]


def _single(logits: _Array) -> Logits:
    return logits.astype(np.float32, copy=False)


def layout(model: ForeignModel) -> KvLayout:
    """Return the layout of the cache."""
    shape = model.manifest.model
    return KvLayout(layers=shape.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
