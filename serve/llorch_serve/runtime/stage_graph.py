"""A loaded graph of one stage: some successive layers of a model, bound to the slots of their cache.

Where other graphs read token ids, those behind the first stage read rows of the residual stream that the
stage before has computed, and where other graphs give logits, those before the last give such rows. Else it
is as :class:`llorch_serve.runtime.bound_graph.BoundGraph`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from llorch_serve.cache.device_buffers import ELEMENT_TYPES
from llorch_serve.cache.kv_cache import SlotCache
from llorch_serve.runtime.bound_graph import CallBinding, LogitsBuffer, runs

Rows = npt.NDArray[Any]
"""What crosses from a stage to the next: [tensors, rows, width], a row for each token of a call."""

CrossingDtype = Literal["float32", "float16", "bfloat16"]
CROSSING_TYPES: Final[dict[CrossingDtype, type[np.generic]]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,  # as it lies in memory: numpy has no bfloat16, and computes nothing with it
}


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a stage is cut from its neighbours.

    takes: inputs that the stage before gives. gives: outputs for the stage behind. Each is [batch, tokens,
        width] of ``dtype``; there are none at the model's ends.
    """

    takes: tuple[str, ...]
    gives: tuple[str, ...]
    width: int
    dtype: CrossingDtype


@dataclass(slots=True)
class CrossingRows:
    """The rows that the stage before has given for the call that is about to be made."""

    values: Rows = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))


class StageGraph:
    """Runs rows through one graph on the slots of one cache.

    session: onnxruntime's. inputs: names of the graph's inputs. cut: which of its inputs and outputs cross.
    rows: holds what is taken; where it does, the tokens of a call are places in it.
    logits: where the last stage writes. in_place: as in :class:`llorch_serve.runtime.bound_graph.BoundGraph`.
    """

    def __init__(
        self,
        session: Any,
        inputs: frozenset[str],
        cache: SlotCache,
        cut: Cut,
        rows: CrossingRows,
        logits: LogitsBuffer,
        *,
        in_place: bool = True,
    ) -> None:
        self._session = session
        self._inputs = inputs
        self._cache = cache
        self._cut = cut
        self._rows = rows
        self._logits = logits
        self._in_place = in_place
        self._bindings: dict[tuple[int, int], _StageBinding] = {}

    def run(
        self, first: int, token_ids: Sequence[int], lengths: Sequence[int], wanted: Sequence[int]
    ) -> Rows:
        """Run as many tokens in each of ``len(lengths)`` slots from ``first`` on.

        token_ids: slot by slot, or places of rows that the stage before gave. lengths: tokens of each slot
            including these. wanted: indices into ``token_ids``.
        Returns logits [len(wanted), vocabulary], or what crosses to the next stage as [len(wanted), tensors,
            width]; valid until the next call.
        Raises ProviderError if the runtime fails.
        """
        count = len(lengths)
        place = self._cache.place(first, count)
        binding = self._bindings.get(place)
        if binding is None:
            io = self._session.io_binding()
            self._cache.bind(io, first, count)
            binding = self._bindings[place] = _StageBinding(io, count, self._inputs, self._cut)
        gives = bool(self._cut.gives)
        rows = 0 if gives else len(wanted)
        binding.resize(tokens=len(token_ids) // count, rows=rows, buffer=self._logits.at_least(rows))
        if self._cut.takes:
            np.take(self._rows.values, token_ids, axis=1, out=binding.taken, mode="clip")
        else:
            binding.input_ids.reshape(-1)[:] = token_ids
        binding.seqlens_k[:] = lengths
        binding.seqlens_k -= 1
        binding.total[...] = max(lengths)
        if not gives:
            binding.indices[:] = wanted
        if not self._in_place:
            if not self._cache.stays_bound:
                self._cache.bind(binding.io, first, count)
            binding.bind_inputs()
        with runs():
            self._session.run_with_iobinding(binding.io)
        if not gives:
            return binding.logits
        found = binding.given.transpose(1, 0, 2)
        return found if tuple(wanted) == tuple(range(len(token_ids))) else found[list(wanted)]


class _StageBinding(CallBinding):
    """Bound buffers of one range of slots, those of crossing tensors among them.

    taken, given: [tensors, rows, width], tensor by tensor in the order of the cut's names.
    """

    def __init__(self, io: Any, batch: int, inputs: frozenset[str], cut: Cut) -> None:
        self._cut = cut
        self.taken = self.given = np.zeros((0, 0, 0), CROSSING_TYPES[cut.dtype])
        super().__init__(io, batch, inputs)

    def bind_inputs(self) -> None:
        """Bind all inputs but the cache's with what they now hold."""
        super().bind_inputs()
        self._bind_taken()

    def resize_tokens(self, tokens: int) -> None:
        """Bind what has a row for each token."""
        super().resize_tokens(tokens)
        cut, rows = self._cut, self.batch * tokens
        self.taken = np.zeros((len(cut.takes), rows, cut.width), self.taken.dtype)
        self.given = np.zeros((len(cut.gives), rows, cut.width), self.given.dtype)
        self._bind_taken()
        for name, tensor in zip(cut.gives, self.given, strict=True):
            self.io.bind_output(name, "cpu", 0, *self._crossing(tensor))

    def resize_rows(self, rows: int) -> None:
        """Bind what has a row for each row of logits, in the last stage."""
        if not self._cut.gives:
            super().resize_rows(rows)

    def _bind_taken(self) -> None:
        for name, tensor in zip(self._cut.takes, self.taken, strict=True):
            self.io.bind_input(name, "cpu", 0, *self._crossing(tensor))

    def _crossing(self, tensor: Rows) -> tuple[int, tuple[int, int, int], int]:
        """Return type, shape and address, as onnxruntime binds a tensor."""
        shape = (self.batch, len(tensor) // self.batch, self._cut.width)
        return ELEMENT_TYPES[self._cut.dtype], shape, tensor.ctypes.data
