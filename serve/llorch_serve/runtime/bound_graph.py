"""A loaded graph whose KV inputs and outputs are the slots of a cache.

Input and output buffers are bound once for each range of slots and then updated in place: binding the KV
tensors afresh would cost a tenth of a decode step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llorch_serve.cache.kv_cache import SlotCache
from llorch_serve.errors import ProviderError

Logits = npt.NDArray[np.float32]


@contextlib.contextmanager
def runs() -> Iterator[None]:
    """Turn whatever the runtime raises inside into a ProviderError."""
    try:
        yield
    except Exception as error:
        raise ProviderError(f"the runtime failed in a step: {str(error).strip().splitlines()[0]}") from error


class LogitsBuffer:
    """Logits [rows, vocabulary] of the last call, whichever graph made it; it grows with the rows that are
    asked for.

    memory: float32 numbers that it is in while they suffice, since others read them there; None: its own.
    """

    def __init__(self, rows: int, vocab_size: int, memory: Logits | None = None) -> None:
        self.vocab_size = vocab_size
        self._array = np.empty((rows if memory is None else 0, vocab_size), np.float32)
        given = np.empty(0, np.float32) if memory is None else memory
        self._given = given[: len(given) // vocab_size * vocab_size].reshape(-1, vocab_size)

    def at_least(self, rows: int) -> Logits:
        """Return the buffer, grown to at least ``rows``."""
        if rows <= len(self._given):
            return self._given
        if rows > len(self._array):
            self._array = np.empty((rows, self.vocab_size), np.float32)
        return self._array


class BoundGraph:
    """Runs tokens through one graph on the slots of one cache.

    session: onnxruntime's. inputs: names of the graph's inputs.
    in_place: inputs are read where they lie in each call; else onnxruntime copies them to the device when
        they are bound, and they are bound anew for each call.
    options: onnxruntime's, of every call.
    """

    def __init__(
        self,
        session: Any,
        inputs: frozenset[str],
        cache: SlotCache,
        logits: LogitsBuffer,
        *,
        in_place: bool = True,
        options: Any = None,
    ) -> None:
        self._in_place = in_place
        self._options = options
        self._session = session
        self._inputs = inputs
        self._cache = cache
        self._logits = logits
        self._bindings: dict[tuple[int, int], CallBinding] = {}

    def run(
        self, first: int, token_ids: Sequence[int], lengths: Sequence[int], wanted: Sequence[int]
    ) -> Logits:
        """Run as many tokens in each of ``len(lengths)`` slots from ``first`` on.

        token_ids: slot by slot. lengths: tokens of each slot including these. wanted: indices into
            ``token_ids`` whose logits are returned, [len(wanted), vocabulary], valid until the next call.
        Raises ProviderError if the runtime fails.
        """
        count = len(lengths)
        place = self._cache.place(first, count)
        binding = self._bindings.get(place)
        if binding is None:
            binding = self._bindings[place] = self._bind(first, count)
        rows = binding.rows_of(wanted)
        binding.resize(tokens=len(token_ids) // count, rows=rows, buffer=self._logits.at_least(rows))
        binding.fill(token_ids, lengths, wanted)
        if not self._in_place:
            if not self._cache.stays_bound:
                self._cache.bind(binding.io, first, count)
            binding.bind_inputs()
        with runs():
            self._session.run_with_iobinding(binding.io, self._options)
        return binding.found(wanted)

    def _bind(self, first: int, count: int) -> CallBinding:
        io = self._session.io_binding()
        self._cache.bind(io, first, count)
        return self._make_binding(io, count)

    def _make_binding(self, io: Any, count: int) -> CallBinding:
        return CallBinding(io, count, self._inputs)


class CallBinding:
    """Bound buffers of one range of slots. The KV tensors stay; the small ones follow the shape of the call.

    inputs: names of the graph's inputs; the buffers of those that its target has not are filled and bound to
        nothing.
    """

    def __init__(self, io: Any, batch: int, inputs: frozenset[str]) -> None:
        self.io = io
        self._inputs = inputs
        self.batch = batch
        self.seqlens_k = np.zeros(batch, np.int32)
        self.total = np.zeros((), np.int32)
        self.input_ids = np.zeros((batch, 0), np.int64)
        self.indices = np.zeros(0, np.int64)
        self.logits = self._buffer = np.zeros((0, 0), np.float32)
        self._tokens = self._rows = -1
        self._bind_input("seqlens_k", self.seqlens_k)
        self._bind_input("total_sequence_length", self.total)

    def rows_of(self, wanted: Sequence[int]) -> int:
        """Return how many rows of logits a call gives."""
        return len(wanted)

    def fill(self, token_ids: Sequence[int], lengths: Sequence[int], wanted: Sequence[int]) -> None:
        """Write what a call is given; see :meth:`BoundGraph.run`."""
        self.fill_tokens(token_ids)
        self.seqlens_k[:] = lengths
        self.seqlens_k -= 1
        self.total[...] = max(lengths)
        self.indices[:] = wanted

    def fill_tokens(self, token_ids: Sequence[int]) -> None:
        """Write the tokens of a call."""
        self.input_ids.reshape(-1)[:] = token_ids

    def found(self, wanted: Sequence[int]) -> npt.NDArray[Any]:
        """Return what a call has given."""
        return self.logits

    def bind_inputs(self) -> None:
        """Bind all inputs but the cache's with what they now hold."""
        for name, array in (
            ("seqlens_k", self.seqlens_k),
            ("total_sequence_length", self.total),
            ("input_ids", self.input_ids),
            ("logits_indices", self.indices),
        ):
            self._bind_input(name, array)

    def resize(self, *, tokens: int, rows: int, buffer: Logits) -> None:
        """Bind inputs for ``tokens`` tokens a slot and the first ``rows`` rows of ``buffer``, unless bound
        already.
        """
        if self._tokens != tokens:
            self._tokens = tokens
            self.resize_tokens(tokens)
        if self._rows != rows or self._buffer is not buffer:
            self._rows, self._buffer = rows, buffer
            self.resize_rows(rows)

    def resize_tokens(self, tokens: int) -> None:
        """Bind what has a row for each token."""
        self.input_ids = np.zeros((self.batch, tokens), np.int64)
        self._bind_input("input_ids", self.input_ids)

    def resize_rows(self, rows: int) -> None:
        """Bind what has a row for each row of logits."""
        self.indices = np.zeros(rows, np.int64)
        self.logits = self._buffer[:rows]
        self._bind_input("logits_indices", self.indices)
        self.io.bind_output("logits", "cpu", 0, np.float32, self.logits.shape, self.logits.ctypes.data)

    def _bind_input(self, name: str, array: npt.NDArray[np.generic]) -> None:
        if name in self._inputs:
            self.io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
