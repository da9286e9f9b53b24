"""Selection without sorting gives what sorting gives, and both forms of the filters keep the same tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_serve.sampling.candidates import Candidates, find_candidates
from llorch_serve.sampling.counts import TokenCounts
from llorch_serve.sampling.filters import filter_few, filter_many
from llorch_serve.sampling.params import ResolvedSampling
from llorch_serve.sampling.selection import at_least_kth, fewest_reaching, largest

Scores = npt.NDArray[np.float32]


def scores_of(seed: int, size: int, *, ties: bool) -> Scores:
    scores = np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)
    return scores.round(1) if ties else scores


def params_of(**params: Any) -> ResolvedSampling:
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    return ResolvedSampling(**{**neutral, "min_tokens": 0, "seed": 0, **params})


@pytest.mark.parametrize("size", [1, 31, 33, 100, 3000, 32_077])
@pytest.mark.parametrize("ties", [True, False])
def test_the_k_largest_are_those_of_a_sort(size: int, ties: bool) -> None:
    scores = scores_of(size, size, ties=ties)
    order = np.argsort(-scores, kind="stable")
    for k in sorted({1, 2, 3, 40, 500, size - 1, size} & set(range(1, size + 1))):
        np.testing.assert_array_equal(largest(scores, k), order[:k])
        np.testing.assert_array_equal(at_least_kth(scores, k), np.flatnonzero(scores >= scores[order[k - 1]]))
    assert largest(scores, 0).size == 0
    np.testing.assert_array_equal(largest(scores, size + 5), order)


def test_the_k_largest_may_be_among_what_is_impossible() -> None:
    scores = np.full(3000, -np.inf, dtype=np.float32)
    scores[[5, 2999]] = [1, 2]
    assert set(at_least_kth(scores, 2)) == {5, 2999}
    assert len(at_least_kth(scores, 3)) == 3000


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1e-9, 0.25, 0.5, 1.0, 7.0, np.inf]), st.integers(0, 8))),
    st.floats(0.01, 1),
    st.booleans(),
)
def test_the_fewest_that_reach_a_share_are_those_of_the_definition(
    pairs: list[tuple[float, int]], share: float, with_ties: bool
) -> None:
    keys, weights = np.array([k for k, _ in pairs]), np.array([w for _, w in pairs], dtype=np.float32)
    if weights.sum() == 0:
        return
    target = share * float(weights.sum())
    order = sorted(range(len(keys)), key=lambda i: (keys[i], i))
    expected, mass = set(), 0.0
    for index in order:
        expected.add(index)
        mass += float(weights[index])
        if mass >= target:
            break
    if with_ties:
        last = max(keys[i] for i in expected)
        expected = {i for i in order if keys[i] <= last}
    assert set(fewest_reaching(keys, weights, target, with_ties=with_ties)) == expected


FILTERS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 1.7},
    {"top_p": 5e-324},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"typical_p": 0.8},
    {"typical_p": 1e-6},
    {"top_k": 100},
    {"top_k": 300, "top_p": 0.8, "min_p": 0.01, "typical_p": 0.7},
    {"top_p": 0.95, "typical_p": 0.5, "temperature": 0.6},
    {"temperature": 1e-60, "top_p": 0.9, "typical_p": 0.9},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("size", [40, 900])
@pytest.mark.parametrize("impossible", [0, 30])
def test_few_and_many_candidates_are_filtered_alike(
    params: dict[str, Any], size: int, impossible: int
) -> None:
    scores = scores_of(size, size, ties=False)
    scores[:impossible] = -np.inf
    wanted = params_of(**params)
    row = find_candidates(scores, wanted)
    ids = np.arange(size) if row.ids is None else row.ids
    table = filter_few([Candidates(ids, row.scores, row.outside)], [wanted])
    few = np.zeros(size)
    few[table.ids[0]] = table.weights[0]
    kept, weights = filter_many(row, wanted)
    many = np.zeros(size)
    many[np.arange(size) if kept is None else kept] = weights
    np.testing.assert_array_equal(few > 0, many > 0)
    np.testing.assert_allclose(few, many, rtol=1e-5)


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_candidates_lose_nothing_that_the_filters_keep(params: dict[str, Any]) -> None:
    scores = scores_of(1, 2000, ties=True)
    wanted = params_of(**params)
    row = find_candidates(scores, wanted)
    ids, weights = filter_many(row, wanted)
    all_ids, all_weights = filter_many(Candidates(None, scores), wanted)
    if wanted.top_k:  # that one is applied by looking for candidates
        assert set(row.ids if row.ids is not None else range(2000)) == set(
            np.flatnonzero(scores >= np.sort(scores)[-wanted.top_k])
        )
    else:
        found = np.arange(2000) if ids is None else ids
        np.testing.assert_array_equal(found, np.arange(2000) if all_ids is None else all_ids)
        np.testing.assert_array_equal(weights, all_weights)


@pytest.mark.parametrize("first", [0.0, -0.0])
@pytest.mark.parametrize("params", [{"top_p": 0.5}, {"typical_p": 0.5}], ids=str)
def test_zeros_of_either_sign_are_equal(params: dict[str, Any], first: float) -> None:
    scores = np.tile(np.array([first, -first, -1.0], np.float32), 700)
    ids, _ = filter_many(find_candidates(scores, params_of(**params)), params_of(**params))
    expected, _ = filter_many(Candidates(None, scores + 1), params_of(**params))
    np.testing.assert_array_equal(ids, expected)


def test_a_row_of_a_table_has_the_same_bits_alone_and_beside_wider_ones() -> None:
    rng = np.random.default_rng(5)
    rows, params = [], []
    for seed, size in enumerate([1, 2, 3, 7, 8, 9, 31, 64, 65, 200, 513, 1000]):
        chosen = FILTERS[seed % len(FILTERS)]
        params.append(params_of(**{**chosen, "top_k": chosen.get("top_k", 0)}))
        rows.append(Candidates(np.arange(size), rng.normal(0, 2, size).astype(np.float32), 0.01 * seed))
    together = filter_few(rows, params)
    for index, row in enumerate(rows):
        alone = filter_few([row], [params[index]])
        size = len(row)
        np.testing.assert_array_equal(together.ids[index, :size], alone.ids[0])
        np.testing.assert_array_equal(together.weights[index, :size], alone.weights[0])
        assert not together.weights[index, size:].any()


@given(
    st.lists(st.integers(0, 9), max_size=30),
    st.lists(st.integers(0, 9), max_size=300),
    st.one_of(st.none(), st.integers(0, 12)),
)
def test_counts_are_those_of_the_window(prompt: list[int], answer: list[int], window: int | None) -> None:
    counts = TokenCounts(prompt, window=window)
    for token in answer:
        counts.append(token)
    everything = prompt + answer
    counted = everything if window is None else everything[len(everything) - min(window, len(everything)) :]
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == dict(Counter(counted))


def test_counts_grow_beyond_their_first_room() -> None:
    counts = TokenCounts([7])
    for token in range(1000):
        counts.append(token)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
        token: 1 + (token == 7) for token in range(1000)
    }
