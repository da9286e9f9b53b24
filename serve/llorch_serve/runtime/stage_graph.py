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
from llorch_serve.runtime.bound_graph import BoundGraph, CallBinding, LogitsBuffer

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


class StageGraph(BoundGraph):
    """Runs rows through one graph on the slots of one cache.

    cut: which of its inputs and outputs cross. rows: holds what is taken; where it does, the tokens of a call
    are places in it.
    logits: where the last stage writes. Where others return logits, a stage before the last returns what
    crosses, as [len(wanted), tensors, width].
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
        super().__init__(session, inputs, cache, logits, in_place=in_place)
        self._cut = cut
        self._rows = rows

    def _make_binding(self, io: Any, count: int) -> CallBinding:
        return _StageBinding(io, count, self._inputs, self._cut, self._rows)


class _StageBinding(CallBinding):
    """Bound buffers of one range of slots, those of crossing tensors among them.

    taken, given: [tensors, rows, width], tensor by tensor in the order of the cut's names.
    """

    def __init__(self, io: Any, batch: int, inputs: frozenset[str], cut: Cut, crossing: CrossingRows) -> None:
        self._cut = cut
        self._rows_before = crossing
        self.taken = self.given = np.zeros((0, 0, 0), CROSSING_TYPES[cut.dtype])
        super().__init__(io, batch, inputs)

    def rows_of(self, wanted: Sequence[int]) -> int:
        """Return how many rows of logits a call gives."""
        return 0 if self._cut.gives else len(wanted)

    def fill(self, token_ids: Sequence[int], lengths: Sequence[int], wanted: Sequence[int]) -> None:
        """Write what a call is given."""
        super().fill(token_ids, lengths, () if self._cut.gives else wanted)

    def fill_tokens(self, token_ids: Sequence[int]) -> None:
        """Write the tokens of a call, or the rows that stand at their places."""
        if self._cut.takes:
            np.take(self._rows_before.values, token_ids, axis=1, out=self.taken, mode="clip")
        else:
            super().fill_tokens(token_ids)

    def found(self, wanted: Sequence[int]) -> Rows:
        """Return the logits, or what crosses to the next stage."""
        if not self._cut.gives:
            return self.logits
        rows = self.given.transpose(1, 0, 2)
        return rows if tuple(wanted) == tuple(range(len(rows))) else rows[list(wanted)]

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
