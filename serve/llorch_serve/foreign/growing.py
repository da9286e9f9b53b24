"""A session on a graph whose outputs, past and new keys and values joined, are the inputs of its next call.

Such a graph has one length for all rows of a batch, so every slot runs on its own; and it is given each
prompt whole, as the tool that made it does, because how it was traced decides whether a prompt in parts is
masked rightly. A slot's cache is a set of immutable tensors: copying a slot shares them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llorch_serve.cache.kv_cache import MEMORY_SHARE, KvCapacity
from llorch_serve.engine.capabilities import Capabilities
from llorch_serve.errors import ProviderError, ResourceError, UsageError
from llorch_serve.foreign.graph import LoadedGraph
from llorch_serve.foreign.model import ForeignModel

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Cache:
    """The runtime's tensors of one sequence, by the names of the inputs that take them."""

    tensors: dict[str, Any]
    length: int


class GrowingSession:
    """Runs whole prompts and single tokens, slot by slot. Not thread-safe."""

    def __init__(self, model: ForeignModel, graph: LoadedGraph, capacity: KvCapacity) -> None:
        self.capacity = capacity
        self.placement = graph.placement
        self.capabilities = Capabilities(
            batched_decode=False,
            chunked_prefill=False,
            chosen_logits=graph.last_logits,
            prompt_logits=not graph.last_logits,
            prefix_reuse=False,
            drafts=False,
        )
        self._graph = graph
        self._names = model.names
        self._vocab_size = model.manifest.model.vocab_size
        layers = range(model.manifest.model.layers)
        self._past = [name for layer in layers for name in model.names.past(layer)]
        self._outputs = [
            model.names.logits,
            *(name for layer in layers for name in model.names.present(layer)),
        ]
        shape = (1, model.manifest.model.kv_heads, 0, model.manifest.model.head_dim)
        nothing = self._tensor(np.zeros(shape, graph.cache_type))
        self._empty = _Cache(dict.fromkeys(self._past, nothing), 0)
        self._slots = [self._empty] * capacity.slots

    def prefill(
        self, slot: int, token_ids: Sequence[int], start: int, wanted: Sequence[int] | None = None
    ) -> Logits:
        """See :meth:`llorch_serve.runtime.session.DecoderSession.prefill`; ``start`` is 0 or the tokens that
        the slot holds.
        """
        if start == 0:
            self._slots[slot] = self._empty
        logits = self._advance(slot, token_ids, start)
        return logits[-1:] if wanted is None else logits[list(wanted)]

    def decode(self, token_ids: Sequence[int], lengths: Sequence[int]) -> Logits:
        """See :meth:`llorch_serve.runtime.session.DecoderSession.decode`; each slot takes a call of its
        own.
        """
        rows = enumerate(zip(token_ids, lengths, strict=True))
        return np.concatenate([self._advance(slot, (token,), length - 1) for slot, (token, length) in rows])

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        """Give a slot the whole cache of another, which holds ``tokens`` tokens."""
        assert self._slots[source].length == tokens
        self._slots[target] = self._slots[source]

    def swap_slots(self, first: int, second: int, tokens: int) -> None:
        """Exchange the caches of two slots."""
        self._slots[first], self._slots[second] = self._slots[second], self._slots[first]

    def release_slot(self, slot: int, keep: int) -> None:
        """Forget the cache of a slot that holds more than ``keep`` tokens."""
        if self._slots[slot].length > keep:
            self._slots[slot] = self._empty

    def verify(self, slot: int, token_ids: Sequence[int], start: int) -> Logits:
        """Not for such a graph, as :attr:`capabilities` says."""
        raise AssertionError((slot, token_ids, start))

    def _advance(self, slot: int, token_ids: Sequence[int], start: int) -> Logits:
        """Run tokens after all that a slot holds; return logits [logits_rows, vocabulary] in float32."""
        cache = self._slots[slot]
        assert cache.length == start, "a growing cache goes on where it ends"
        end = start + len(token_ids)
        feed = {
            self._names.input_ids: self._tensor(np.array([token_ids], self._graph.ids_type)),
            self._names.attention_mask: self._tensor(np.ones((1, end), self._graph.mask_type)),
            **cache.tensors,
        }
        if self._graph.positions_type is not None:
            positions = np.arange(start, end, dtype=self._graph.positions_type)[None]
            feed[self._names.position_ids] = self._tensor(positions)
        try:
            logits, *present = self._graph.session.run_with_ort_values(self._outputs, feed)
            found: npt.NDArray[np.generic] = logits.numpy()
        except Exception as error:  # the runtime's own classes of errors share no narrower base
            raise ProviderError(
                f"the runtime failed in a step: {str(error).strip().splitlines()[0]}"
            ) from error
        self._slots[slot] = _Cache(dict(zip(self._past, present, strict=True)), end)
        expected = (1, self._graph.logits_rows(len(token_ids)), self._vocab_size)
        if found.shape != expected:
            raise ProviderError(
                f"the graph computed logits of shape {found.shape}, expected {expected}; its folder's "
                f"config is not its own"
            )
        rows: Logits = found[0].astype(np.float32, copy=False)
        return rows

    def _tensor(self, array: npt.NDArray[np.generic]) -> Any:
        return self._graph.runtime.OrtValue.ortvalue_from_numpy(array)


def plan_growing(
    model: ForeignModel, cache_bytes: int, *, slots: int, max_context: int | None, free_bytes: int
) -> KvCapacity:
    """Choose the tokens per slot, so that a prompt of that length still fits memory.

    cache_bytes: size of one cached number. While a slot grows it is there twice, a whole prompt's logits are
        in memory twice, and its attention scores are a square for each head.
    Raises UsageError for values out of range, ResourceError if the choice does not fit ``free_bytes``.
    """
    shape, longest = model.manifest.model, model.manifest.context_length
    if slots < 1:
        raise UsageError(f"--slots is {slots}; at least 1 is needed")
    if max_context is not None and not 2 <= max_context <= longest:
        raise UsageError(f"--max-context is {max_context}; this model takes 2 to {longest}")
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * cache_bytes

    def needed(context: int) -> int:
        scores = 2 * shape.heads * context * context * 4
        return context * ((slots + 1) * per_token + 2 * shape.vocab_size * 4) + scores

    budget = int(free_bytes * MEMORY_SHARE)
    wanted = max_context or longest
    if needed(wanted) <= budget:
        return KvCapacity(slots, wanted, per_token, slots * wanted)
    fitting = bisect_right(range(wanted), budget, key=needed) - 1
    if max_context is not None or fitting < 2:
        raise ResourceError(
            f"{slots} slots of {wanted} tokens need {needed(wanted) / 2**20:.0f} MiB in a graph with a "
            f"growing cache and "
            f"{budget / 2**20:.0f} MiB may be used ({MEMORY_SHARE:.0%} of what is free); choose fewer "
            f"--slots or a "
            "smaller --max-context"
        )
    return KvCapacity(slots, fitting, per_token, slots * fitting, limited_by_memory=True)
