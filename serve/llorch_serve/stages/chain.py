"""The stages of one lane, one behind the other, as one graph over one cache.

:class:`llorch_serve.runtime.session.DecoderSession` runs a chain as it runs a graph of all layers, so that
whatever a session does with slots, parts of prompts and rows of logits is the same for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llorch_serve.artifact.manifest import KvLayout
from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.engine.plan import SlotCopy, SlotEdit, SlotRelease, SlotSwap
from llorch_serve.runtime.bound_graph import Logits
from llorch_serve.runtime.stage_graph import Rows
from llorch_serve.stages.calls import StageCall, StageCallee, StagePort


class Chain:
    """All stages as a graph. callees: in the order of the stages. prompt: it is for parts of prompts."""

    def __init__(self, callees: Sequence[StageCallee], *, prompt: bool) -> None:
        self._callees = callees
        self._prompt = prompt

    def run(
        self, first: int, token_ids: Sequence[int], lengths: Sequence[int], wanted: Sequence[int]
    ) -> Logits:
        """Do what :meth:`llorch_serve.runtime.bound_graph.BoundGraph.run` does.

        Raises ProviderError or ResourceError if a stage fails, StageEndedError if one is gone.
        """
        rows: Rows | None = None
        for callee in self._callees:
            rows = callee.run(StageCall(self._prompt, first, lengths, token_ids, wanted, rows))
        assert rows is not None, "a model has stages"
        return rows


class MirroredCache:
    """The slots of one lane, whose layers lie in the caches of all stages: an edit is made in each of them.

    kv: of all layers together. takes_batches: one call takes a token of each of several slots.
    """

    stays_bound = True

    def __init__(
        self, ports: Sequence[StagePort], kv: KvLayout, capacity: KvCapacity, *, takes_batches: bool
    ) -> None:
        self.kv = kv
        self.capacity = capacity
        self.takes_batches = takes_batches
        self._ports = ports

    def place(self, first: int, count: int) -> tuple[int, int]:
        """Return what tells neighbouring slots from all others."""
        return (first, count)

    def bind(self, io: Any, first: int, count: int) -> None:
        """Bind nothing: each stage's graphs are bound to its own part."""

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` positions of one slot to another."""
        self._edit(SlotCopy(source, target, tokens))

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Exchange the first ``tokens`` positions of two slots."""
        self._edit(SlotSwap(first, second, tokens))

    def release(self, slot: int, keep: int) -> None:
        """Give memory beyond the first ``keep`` positions back to the system."""
        self._edit(SlotRelease(slot, keep))

    def _edit(self, edit: SlotEdit) -> None:
        for port in self._ports:
            port.edit(edit)
