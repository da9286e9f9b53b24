"""An artifact loaded on an execution provider: its graphs, bound to one KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llorch_serve.artifact.folder import Artifact
from llorch_serve.cache.device_cache import DeviceCache
from llorch_serve.cache.handoff import Handoff
from llorch_serve.cache.kv_cache import KvCapacity, SlotCache
from llorch_serve.engine.capabilities import Capabilities
from llorch_serve.engine.chunking import doubling_position
from llorch_serve.providers import Placement
from llorch_serve.runtime.bound_graph import BoundGraph, Logits
from llorch_serve.runtime.device_graph import DeviceGraph
from llorch_serve.runtime.row_pairs import PairedGraph

Graph = BoundGraph | PairedGraph | DeviceGraph


class DecoderSession:
    """Runs prefill chunks and decode steps on the slots of its KV cache. Not thread-safe.

    steps: the graph that advances running sequences. prompts: the one that takes prompts, often the same.
    cache: what running sequences read. capacity: what of it there is for sequences. handoff: where prompts
        are computed in another type than that one's.
    most_rows: of one sequence that a call may have; None: any number. some_row: a call has some row of
        logits, wanted or not.
    """

    def __init__(
        self,
        artifact: Artifact,
        where: Placement,
        cache: SlotCache,
        *,
        capacity: KvCapacity,
        steps: Graph,
        prompts: Graph,
        handoff: Handoff | None,
        batch_invariant: bool,
        most_rows: int | None = None,
        some_row: bool = False,
    ) -> None:
        self.artifact = artifact
        self.placement = where
        self.capacity = capacity
        self.kv_dtype = cache.kv.dtype
        # A target without chunked prefill takes a prompt whole, however long.
        in_parts = artifact.manifest.chunked_prefill  # as are the rest of a reused prefix, and a draft
        self.capabilities = Capabilities(
            batched_decode=not isinstance(cache, DeviceCache),
            batch_invariant=batch_invariant,
            chunked_prefill=in_parts,
            prefix_reuse=in_parts,
            drafts=in_parts,
            separate_prompts=prompts is not steps,
            doubling_position=doubling_position(artifact.manifest.model) if in_parts else None,
        )
        self.vocab_size = artifact.manifest.model.vocab_size
        self.cache = cache
        self._steps = steps
        self._prompts = prompts
        self._handoff = handoff
        self._most_rows = most_rows
        self._some_row = some_row

    def prefill(
        self, slot: int, token_ids: Sequence[int], start: int, wanted: Sequence[int] | None = None
    ) -> Logits:
        """Run ``token_ids`` at positions ``start`` and on of one slot.

        wanted: indices into ``token_ids`` whose logits are returned; None: the last one's.
        Returns logits [len(wanted), vocabulary], valid until the next call.
        Raises ProviderError if the runtime fails.
        """
        rows = [len(token_ids) - 1] if wanted is None else wanted
        if self._handoff is None:
            return self._advance(self._prompts, slot, token_ids, start, rows)
        self._handoff.begin(slot, start)
        logits = self._advance(self._prompts, 0, token_ids, start, rows)
        self._handoff.end(start + len(token_ids))
        return logits

    def decode(self, token_ids: Sequence[int], lengths: Sequence[int]) -> Logits:
        """Run one token of each of the slots 0, 1, ... len(token_ids) - 1.

        lengths: tokens of each slot including this one. Returns logits [slots, vocabulary], valid until the
            next call.
        Raises ProviderError if the runtime fails.
        """
        if self.capabilities.batched_decode:
            return self._steps.run(0, token_ids, lengths, range(len(token_ids)))
        rows = enumerate(zip(token_ids, lengths, strict=True))
        return np.concatenate(
            [self._steps.run(slot, (token,), (length,), (0,)).copy() for slot, (token, length) in rows]
        )

    def verify(self, slot: int, token_ids: Sequence[int], start: int) -> Logits:
        """Run ``token_ids`` at positions ``start`` and on of one slot; return logits [len(token_ids),
        vocabulary].

        Raises ProviderError if the runtime fails.
        """
        return self._advance(self._steps, slot, token_ids, start, range(len(token_ids)))

    def _advance(
        self,
        graph: Graph,
        slot: int,
        token_ids: Sequence[int],
        start: int,
        rows: Sequence[int],
    ) -> Logits:
        """Run tokens of one slot, in as many calls as it takes."""
        if not rows and self._some_row:
            return self._advance(graph, slot, token_ids, start, [len(token_ids) - 1])[:0]
        most = self._most_rows or len(token_ids)
        if len(token_ids) <= most:
            return graph.run(slot, token_ids, [start + len(token_ids)], rows)
        logits = np.empty((len(rows), self.vocab_size), np.float32)
        for first in range(0, len(token_ids), most):
            part = token_ids[first : first + most]
            here = [place for place, row in enumerate(rows) if first <= row < first + len(part)]
            # A call has some row of logits, wanted or not.
            wanted = [rows[place] - first for place in here] or [0]
            found = graph.run(slot, part, [start + first + len(part)], wanted)
            logits[here] = found[: len(here)]
        return logits

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        """Copy the keys and values of the first ``tokens`` positions to another slot."""
        self.cache.copy(source, target, tokens)
        if self._handoff is not None:
            self._handoff.overwritten(target)

    def swap_slots(self, first: int, second: int, tokens: int) -> None:
        """Exchange the keys and values of the first ``tokens`` positions of two slots."""
        self.cache.swap(first, second, tokens)
        if self._handoff is not None:
            self._handoff.swapped(first, second)

    def release_slot(self, slot: int, keep: int) -> None:
        """Give the memory behind a slot's positions from ``keep`` on back to the system."""
        self.cache.release(slot, keep)
