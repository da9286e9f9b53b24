"""Padding to an even number of rows: what the graph is given, what comes back, and what the cache holds
afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from llorch_serve.artifact.manifest import KvLayout, Recipe
from llorch_serve.cache.kv_cache import KvCache, KvCapacity
from llorch_serve.errors import ProviderError, UsageError
from llorch_serve.runtime.bound_graph import BoundGraph, Logits
from llorch_serve.runtime.row_pairs import PairedGraph, require_effect

SLOTS, CONTEXT = 4, 8


@dataclass
class Recorded:
    """Notes its calls, writes to every position they write, and returns the tokens as logits."""

    cache: KvCache
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    error: ProviderError | None = None

    def run(
        self, first: int, token_ids: Sequence[int], lengths: Sequence[int], wanted: Sequence[int]
    ) -> Logits:
        self.calls.append((first, tuple(token_ids), tuple(lengths), tuple(wanted)))
        tokens = len(token_ids) // len(lengths)
        for row, length in enumerate(lengths):
            self.cache.rows(0, "key", first + row, 1)[0, :, length - tokens : length] = 99
        if self.error is not None:
            raise self.error
        return np.array([[token_ids[row]] for row in wanted], np.float32).reshape(len(wanted), 1)


@pytest.fixture
def cache() -> KvCache:
    made = KvCache(
        KvLayout(layers=1, kv_heads=2, head_dim=4), KvCapacity(SLOTS, CONTEXT, 64, SLOTS * CONTEXT)
    )
    made.rows(0, "key", 0, SLOTS)[:] = 7
    return made


@pytest.mark.parametrize(
    ("call", "given"),
    [
        # one token of some slots: another slot's position 0 stands in
        ((0, (5, 6), (3, 4), (0, 1)), (0, (5, 6), (3, 4), (0, 1))),
        ((0, (5,), (3,), (0,)), (0, (5, 5), (3, 1), (0, 0))),
        ((0, (5, 6, 7), (3, 4, 8), (0, 1, 2)), (0, (5, 6, 7, 5), (3, 4, 8, 1), (0, 1, 2, 2))),
        ((3, (5,), (3,), (0,)), (2, (5, 5), (1, 3), (1, 1))),
        ((2, (5,), (1,), ()), (2, (5, 5), (1, 1), ())),
        # a part of a prompt: the position after it does
        ((1, (5, 6), (6,), (1,)), (1, (5, 6), (6,), (1, 1))),
        ((1, (5, 6, 7), (7,), (2,)), (1, (5, 6, 7, 7), (8,), (2, 2))),
        ((1, (5, 6, 7), (7,), ()), (1, (5, 6, 7, 7), (8,), ())),
    ],
)
def test_rows_are_even_and_padding_does_not_come_back(
    cache: KvCache, call: tuple[Any, ...], given: tuple[Any, ...]
) -> None:
    graph = Recorded(cache)
    logits = PairedGraph(cast("BoundGraph", graph), cache).run(*call)
    assert graph.calls == [given]
    assert logits[:, 0].tolist() == [call[1][row] for row in call[3]]


@pytest.mark.parametrize("wanted", [(), (0,), (4,), (0, 2, 3, 4), (2, 3)])
def test_where_no_position_is_left_for_padding_the_last_two_tokens_go_once_more(
    cache: KvCache, wanted: tuple[int, ...]
) -> None:
    graph = Recorded(cache)
    logits = PairedGraph(cast("BoundGraph", graph), cache).run(1, (1, 2, 3, 4, 5), (8,), wanted)
    assert [(tokens, lengths) for _, tokens, lengths, _ in graph.calls] == [
        ((1, 2, 3, 4), (7,)),
        ((4, 5), (8,)),
    ]
    assert all(len(rows) % 2 == 0 for *_, rows in graph.calls)
    assert logits[:, 0].tolist() == [row + 1 for row in wanted]


@pytest.mark.parametrize("slot", [0, 3])
@pytest.mark.parametrize("error", [None, ProviderError("the runtime failed")])
def test_the_slot_that_stands_in_keeps_what_it_holds(
    cache: KvCache, slot: int, error: ProviderError | None
) -> None:
    graph = Recorded(cache, error=error)
    paired = PairedGraph(cast("BoundGraph", graph), cache)
    if error is None:
        paired.run(slot, (5,), (4,), (0,))
    else:
        with pytest.raises(ProviderError):
            paired.run(slot, (5,), (4,), (0,))
    changed = cache.rows(0, "key", 0, SLOTS)[:, 0, :, 0] == 99
    assert np.argwhere(changed).tolist() == [[slot, 3]]


def recipe(precision: str, head: str, block_size: int | None = None, **fields: Any) -> Recipe:
    return msgspec.convert(
        {
            "precision": precision,
            "head_precision": head,
            "block_size": block_size,
            "accuracy_level": 4,
            "kl_limit": 1.0,
            **fields,
        },
        Recipe,
    )


PLAIN = recipe("int8", "fp32", 64)
RULE = {"modules": ["a"], "precision": "int8", "block_size": 256}


@pytest.mark.parametrize(
    "paired",
    [
        recipe("int4", "int8", 32),
        recipe("source", "source"),
        recipe("int8", "int8", 128),
        recipe("int8", "int8", 32, fine_block_size=128),
        recipe("int8", "int8", 32, rules=[RULE]),
    ],
)
def test_the_flag_has_an_effect_on_four_bits_and_on_large_blocks(paired: Recipe) -> None:
    require_effect([PLAIN, paired], on_cpu=True)


@pytest.mark.parametrize(
    ("plain", "on_cpu", "words"),
    [
        (PLAIN, True, "no effect here: fp32 and int8"),
        (recipe("int4", "int8", 32), False, "is for the cpu provider"),
    ],
)
def test_elsewhere_it_is_refused(plain: Recipe, on_cpu: bool, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        require_effect([plain], on_cpu=on_cpu)


def test_it_is_refused_where_experts_compute_the_rows_that_chose_them() -> None:
    with pytest.raises(UsageError, match="cannot be kept for this model: each of its experts"):
        require_effect([recipe("int4", "int8", 32)], on_cpu=True, has_experts=True)
