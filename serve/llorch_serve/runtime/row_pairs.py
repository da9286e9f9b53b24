"""Runs a graph on an even number of rows, so that kernels which take rows in pairs give each row the same
bits in any call.

MatMulNBits multiplies by 4-bit weights, and by 8-bit ones in blocks of more than 64, two rows at a time, and
a last odd row by another kernel, whose last bits differ. So a row's bits depend on whether it is that one:
alone, at the end of an odd batch, or at the end of a part of a prompt. The session puts :class:`PairedGraph`
around its graphs under ``--batch-invariant``; what it returns has no padding in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from llorch_serve.artifact.manifest import Recipe
from llorch_serve.cache.kv_cache import KvCache
from llorch_serve.errors import UsageError
from llorch_serve.runtime.bound_graph import BoundGraph, Logits
from llorch_serve.runtime.stage_graph import StageGraph

_PAIRED: Final = frozenset({"int4", "source"})
"""Precisions some of whose kernels take rows in pairs; ``source`` holds blocks of 4 bits among others."""

_MOST_SINGLE: Final = 64
"""Elements of the largest 8-bit blocks whose kernel takes rows one by one."""


def takes_pairs(recipe: Recipe) -> bool:
    """Return whether some kernel takes the rows of a graph of this recipe in pairs."""
    sizes = (recipe.block_size, recipe.fine_block_size, *(rule.block_size for rule in recipe.rules))
    return bool(_PAIRED & recipe.precisions) or any((size or 0) > _MOST_SINGLE for size in sizes)


def even(count: int) -> int:
    """Return the next even number, or the number itself."""
    return count + count % 2


def require_effect(recipes: Sequence[Recipe], *, on_cpu: bool, has_experts: bool = False) -> None:
    """Raise UsageError where ``--batch-invariant`` changes nothing or cannot keep its promise.

    recipes: of the graphs that are loaded. on_cpu: they run on the CPU provider. has_experts: some layers
        have several blocks, of which each row takes a few.
    """
    if not on_cpu:
        raise UsageError(
            "--batch-invariant is for the cpu provider; what another gives a row in a batch is not known. "
            "Leave it out"
        )
    if has_experts:
        raise UsageError(
            "--batch-invariant cannot be kept for this model: each of its experts computes the rows of a "
            "call that chose it together, and which those are depends on the neighbours. Leave it out"
        )
    if not any(map(takes_pairs, recipes)):
        found = sorted({precision for recipe in recipes for precision in recipe.precisions})
        raise UsageError(
            f"--batch-invariant has no effect here: {' and '.join(found)} give every request the same bits "
            f"in any batch "
            "as they are; leave it out"
        )


class PairedGraph:
    """A graph whose calls have an even number of rows, of tokens and of logits.

    cache: what the graph is bound to, with an even number of slots, so that an odd batch has a slot for its
        row of padding.
    """

    def __init__(self, graph: BoundGraph | StageGraph, cache: KvCache) -> None:
        assert cache.capacity.slots % 2 == 0
        self._graph = graph
        self._cache = cache
        layers = range(cache.kv.layers)
        self._places = [(layer, kind) for layer in layers for kind in ("key", "value")]

    def run(
        self, first: int, token_ids: Sequence[int], lengths: Sequence[int], wanted: Sequence[int]
    ) -> Logits:
        """Do what :meth:`llorch_serve.runtime.bound_graph.BoundGraph.run` does, with a row of padding where
        the number of rows is odd.

        Raises ProviderError if the runtime fails.
        """
        rows = (*wanted, wanted[-1]) if len(wanted) % 2 else wanted
        if len(token_ids) % 2 == 0:
            return self._graph.run(first, token_ids, lengths, rows)[: len(wanted)]
        if len(token_ids) == len(lengths):
            return self._run_odd_batch(first, token_ids, lengths, rows)[: len(wanted)]
        (length,) = lengths
        if length == self._cache.capacity.context:
            return self._run_to_context_end(first, token_ids, length, wanted)
        # The position after the part is written again before it is read.
        return self._graph.run(first, (*token_ids, token_ids[-1]), (length + 1,), rows)[: len(wanted)]

    def _run_to_context_end(
        self, first: int, token_ids: Sequence[int], length: int, wanted: Sequence[int]
    ) -> Logits:
        """Run an odd part, of three tokens or more, that fills the context: no position is left for one of
        padding.

        All but the last token are run, and then the last two.
        """
        before = [row for row in wanted if row < len(token_ids) - 1]
        found = self.run(first, token_ids[:-1], (length - 1,), before).copy()
        last = self.run(first, token_ids[-2:], (length,), (1,) * (len(wanted) - len(before)))
        return np.concatenate([found, last])

    def _run_odd_batch(
        self, first: int, token_ids: Sequence[int], lengths: Sequence[int], wanted: Sequence[int]
    ) -> Logits:
        """Run one token a slot, and one of padding at position 0 of a neighbouring slot, which is restored
        afterwards.

        That slot may hold a prompt under way, or a prefix for later.
        """
        after = first + len(lengths)
        below = after == self._cache.capacity.slots
        spare = first - 1 if below else after
        kept = [self._cache.rows(*place, spare, 1)[0, :, :1].copy() for place in self._places]
        try:
            if below:
                moved = [row + 1 for row in wanted]
                return self._graph.run(spare, (token_ids[0], *token_ids), (1, *lengths), moved)
            return self._graph.run(first, (*token_ids, token_ids[0]), (*lengths, 1), wanted)
        finally:
            for place, held in zip(self._places, kept, strict=True):
                self._cache.rows(*place, spare, 1)[0, :, :1] = held
