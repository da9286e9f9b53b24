"""An artifact loaded on an execution provider: its graphs, bound to one KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from llorch_serve.artifact.folder import Artifact
from llorch_serve.cache.handoff import Handoff
from llorch_serve.cache.kv_cache import KvCapacity, SlotCache
from llorch_serve.engine.capabilities import Capabilities
from llorch_serve.engine.chunking import attention_crossover
from llorch_serve.providers import Placement
from llorch_serve.runtime.bound_graph import Logits
from llorch_serve.runtime.step_buffers import Leading, TokenIds


class Graph(Protocol):
    """What a session needs of a loaded graph that is bound to its cache; see
    :class:`llorch_serve.runtime.bound_graph.BoundGraph`.
    """

    def run(
        self, first: int, token_ids: Sequence[int], lengths: Sequence[int], wanted: Sequence[int]
    ) -> Logits:
        """Run as many tokens in each of ``len(lengths)`` slots from ``first`` on; return the logits of those
        that are wanted.
        """


class ChoosingGraph(Protocol):
    """A graph that chooses tokens where it computes their logits; see
    :class:`llorch_serve.runtime.device_graph.DeviceGraph`.
    """

    def run_greedy(self, token_ids: Sequence[int], lengths: Sequence[int]) -> TokenIds:
        """Run one token of each of the first slots; return the most likely next one of each."""

    @property
    def leading(self) -> int:
        """How many tokens of each row it finds; 0: it does not."""

    def run_leading(
        self, token_ids: Sequence[int], lengths: Sequence[int], temperatures: Sequence[float]
    ) -> Leading:
        """Run one token of each of the first slots; return the likeliest next ones of each."""

    def step_logits(self, rows: Sequence[int]) -> Logits:
        """Return the logits of some rows of the last step."""


@dataclass(frozen=True, slots=True)
class SessionGraphs:
    """The graphs of a session, bound to its cache.

    decode: advances running sequences. prompts: takes prompts; often the same graph.
    handoff: converts the keys and values of prompts to the cache's type; None: they are computed in it.
    chooses: advances running sequences, and chooses their tokens too; None: it cannot choose.
    """

    decode: Graph
    prompts: Graph
    handoff: Handoff | None
    chooses: ChoosingGraph | None = None


class DecoderSession:
    """Runs prefill chunks and decode steps on the slots of its KV cache. Not thread-safe.

    cache: what running sequences read. capacity: the part of it that sequences may use.
    batch_invariant: a sequence gets the same bits whatever else is running.
    max_rows: most tokens of one sequence in a call; None: any number.
    needs_one_logits_row: the runtime fails in a call that asks for no row of logits.
    """

    def __init__(
        self,
        artifact: Artifact,
        where: Placement,
        cache: SlotCache,
        graphs: SessionGraphs,
        *,
        capacity: KvCapacity,
        batch_invariant: bool,
        max_rows: int | None = None,
        needs_one_logits_row: bool = False,
    ) -> None:
        self.artifact = artifact
        self.placement = where
        self.capacity = capacity
        self.kv_dtype = cache.kv.dtype
        # A target without chunked prefill takes a prompt whole, however long.
        in_parts = artifact.manifest.chunked_prefill  # as are the rest of a reused prefix, and a draft
        self.capabilities = Capabilities(
            batched_decode=cache.takes_batches,
            batch_invariant=batch_invariant,
            chunked_prefill=in_parts,
            prefix_reuse=in_parts,
            drafts=in_parts,
            separate_prompts=graphs.prompts is not graphs.decode,
            greedy_decode=graphs.chooses is not None,
            leading_decode=graphs.chooses.leading if graphs.chooses is not None else 0,
            attention_crossover=attention_crossover(artifact.manifest.model) if in_parts else None,
        )
        self.vocab_size = artifact.manifest.model.vocab_size
        self.cache = cache
        self._decode = graphs.decode
        self._prompts = graphs.prompts
        self._handoff = graphs.handoff
        self._chooses = graphs.chooses
        self._max_rows = max_rows
        self._needs_one_logits_row = needs_one_logits_row

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
        if self._handoff is not None:
            for slot, length in enumerate(lengths):
                self._handoff.written(slot, length - 1)
        if self.capabilities.batched_decode:
            return self._decode.run(0, token_ids, lengths, range(len(token_ids)))
        rows = enumerate(zip(token_ids, lengths, strict=True))
        return np.concatenate(
            [self._decode.run(slot, (token,), (length,), (0,)).copy() for slot, (token, length) in rows]
        )

    def decode_greedy(self, token_ids: Sequence[int], lengths: Sequence[int]) -> TokenIds:
        """Run one token of each of the slots 0, 1, ... as :meth:`decode`; return the most likely next token
        of each, [slots]: the first of the largest logits, -1 where a logit is not finite.

        Only where :attr:`capabilities` has ``greedy_decode``. Raises ProviderError if the runtime fails.
        """
        assert self._chooses is not None
        return self._chooses.run_greedy(token_ids, lengths)

    def decode_leading(
        self, token_ids: Sequence[int], lengths: Sequence[int], temperatures: Sequence[float]
    ) -> Leading:
        """Run one token of each of the slots 0, 1, ... as :meth:`decode`; return the ids of the likeliest
        next tokens of each, the likeliest first, and their logits, [slots, leading], and the sum over all
        tokens of exp((logit - the largest) / temperature), [slots], which is not finite where a logit is not.

        Only where :attr:`capabilities` has ``leading_decode``. Raises ProviderError if the runtime fails.
        """
        assert self._chooses is not None
        return self._chooses.run_leading(token_ids, lengths, temperatures)

    def step_logits(self, rows: Sequence[int]) -> Logits:
        """Return logits [len(rows), vocabulary] of some rows of the last call, which must have been
        :meth:`decode_greedy` or :meth:`decode_leading`; valid until the next call. Raises ProviderError if
        the device fails.
        """
        assert self._chooses is not None
        return self._chooses.step_logits(rows)

    def verify(self, slot: int, token_ids: Sequence[int], start: int) -> Logits:
        """Run ``token_ids`` at positions ``start`` and on of one slot; return logits [len(token_ids),
        vocabulary].

        Raises ProviderError if the runtime fails.
        """
        if self._handoff is not None:
            self._handoff.written(slot, start)
        return self._advance(self._decode, slot, token_ids, start, range(len(token_ids)))

    def _advance(
        self,
        graph: Graph,
        slot: int,
        token_ids: Sequence[int],
        start: int,
        rows: Sequence[int],
    ) -> Logits:
        """Run tokens of one slot, in as many calls as it takes."""
        if not rows and self._needs_one_logits_row:
            return self._advance(graph, slot, token_ids, start, [len(token_ids) - 1])[:0]
        most = self._max_rows or len(token_ids)
        if len(token_ids) <= most:
            return graph.run(slot, token_ids, [start + len(token_ids)], rows)
        logits = np.empty((len(rows), self.vocab_size), np.float32)
        for first in range(0, len(token_ids), most):
            part = token_ids[first : first + most]
            here = [place for place, row in enumerate(rows) if first <= row < first + len(part)]
            # A part whose logits nobody wants asks for one row all the same.
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
