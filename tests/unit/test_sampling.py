"""Every sampling parameter has its effect, refuses what is out of range, and is blind to the rest of the
batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_serve.artifact.manifest import GenerationDefaults
from llorch_serve.errors import ArtifactError, InvalidRequestError, NonFiniteLogitsError
from llorch_serve.sampling.drawable import DrawableIds
from llorch_serve.sampling.draws import Draws, uniforms
from llorch_serve.sampling.params import MAX_SEED, ResolvedSampling, SamplingParams, check_defaults, resolve
from llorch_serve.sampling.sampler import SamplingRow, distribution, sample_batch

NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "seed": 7,
}
LOGITS = np.array([1.0, 3.0, 2.0, 0.0, -1.0], dtype=np.float32)


def row_of(*, prompt: Sequence[int] = (), stops: Sequence[int] = (), **params: Any) -> SamplingRow:
    resolved = ResolvedSampling(**{**NEUTRAL, **params})
    return SamplingRow.begin(resolved, prompt_ids=prompt, stop_ids=stops)


def sample(logits: npt.NDArray[np.float32], row: SamplingRow) -> int:
    (token,) = sample_batch(logits[None], [row])
    assert isinstance(token, int), token
    return token


def probabilities(logits: npt.NDArray[np.float32], row: SamplingRow) -> npt.NDArray[np.float64]:
    ids, weights = distribution(logits, row)
    full = np.zeros(len(logits))
    full[ids] = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    return full


def softmax(logits: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(logits, dtype=np.float64)
    weights = np.exp(values - values.max())
    return weights / weights.sum()


# One test per parameter.


def test_temperature_zero_takes_the_first_maximum_whatever_else_is_set() -> None:
    logits = np.array([0, 5, 5, 1], dtype=np.float32)
    row = row_of(temperature=0.0, top_k=2, top_p=0.5, min_p=0.5)
    assert sample(logits, row) == 1
    assert sample_batch(logits[None], [row]) == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_divides_logits(temperature: float) -> None:
    expected = softmax(LOGITS / temperature)
    np.testing.assert_allclose(probabilities(LOGITS, row_of(temperature=temperature)), expected, rtol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 4, 5, 10**9])
def test_top_k_keeps_the_k_most_likely(top_k: int) -> None:
    kept = np.flatnonzero(probabilities(LOGITS, row_of(top_k=top_k)))
    assert set(kept) == set(np.argsort(-LOGITS)[:top_k])


def test_top_k_keeps_tokens_that_tie_with_the_last() -> None:
    logits = np.array([1, 2, 1, 0], dtype=np.float32)
    assert set(np.flatnonzero(probabilities(logits, row_of(top_k=2)))) == {0, 1, 2}


@pytest.mark.parametrize("vocab", [100, 5000])
@pytest.mark.parametrize("top_k", [1, 3, 40, 99, 3000])
def test_top_k_finds_the_same_tokens_in_large_vocabularies(vocab: int, top_k: int) -> None:
    logits = np.random.default_rng(3).permutation(vocab).astype(np.float32) / vocab
    kept = np.flatnonzero(probabilities(logits, row_of(top_k=top_k)))
    assert set(kept) == set(np.argsort(-logits)[:top_k])


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-4, {1}), (0.6, {1}), (0.7, {1, 2}), (0.9, {0, 1, 2}), (1.0, set(range(5)))]
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, kept: set[int]) -> None:
    assert set(np.flatnonzero(probabilities(LOGITS, row_of(top_p=top_p)))) == kept


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([-30.0, -2.0, 0.0, 0.001, 0.5, 3.0, 9.0]), min_size=1, max_size=60),
    st.floats(1e-4, 1, exclude_max=True),
)
def test_top_p_equals_the_definition_ties_by_id(values: list[float], top_p: float) -> None:
    logits = np.array(values, dtype=np.float32)
    expected = softmax(logits)
    order = np.argsort(-expected, kind="stable")
    reached = np.cumsum(expected[order])
    if np.abs(reached - top_p).min() < 1e-5:
        return  # float32 may round to either side
    kept = order[: int((reached >= top_p).argmax()) + 1]
    found = np.flatnonzero(probabilities(logits, row_of(top_p=top_p)))
    # Weights too small for float32's exponent count as nothing, and can only be the last ones.
    assert set(found) == set(kept)


def test_top_p_works_on_what_top_k_left() -> None:
    # Among 1 and 2 alone, token 1 has 0.731 of the mass; over all five it has 0.636.
    assert set(np.flatnonzero(probabilities(LOGITS, row_of(top_k=2, top_p=0.7)))) == {1}
    assert set(np.flatnonzero(probabilities(LOGITS, row_of(top_p=0.7)))) == {1, 2}


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.0, set(range(5))), (0.1, {0, 1, 2}), (0.3, {1, 2}), (1.0, {1})]
)
def test_min_p_drops_what_is_unlikely_beside_the_best(min_p: float, kept: set[int]) -> None:
    assert set(np.flatnonzero(probabilities(LOGITS, row_of(min_p=min_p)))) == kept


def test_repetition_penalty_makes_seen_tokens_less_likely_also_below_zero() -> None:
    logits = np.array([-1.0, -1.1, 2.0, 2.0], dtype=np.float32)
    row = row_of(prompt=[0, 2], repetition_penalty=1.5)
    np.testing.assert_allclose(probabilities(logits, row), softmax([-1.5, -1.1, 2 / 1.5, 2.0]), rtol=1e-5)
    row.append(3)
    np.testing.assert_allclose(probabilities(logits, row), softmax([-1.5, -1.1, 2 / 1.5, 2 / 1.5]), rtol=1e-5)


def test_repetition_penalty_changes_the_greedy_choice() -> None:
    row = row_of(prompt=[1], temperature=0.0, repetition_penalty=2.0)
    assert sample_batch(LOGITS[None], [row]) == [2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_forbids_stop_tokens_exactly_so_many_times(temperature: float) -> None:
    logits = np.array([0, 0, 50, 0], dtype=np.float32)
    row = row_of(stops=[2], min_tokens=4, temperature=temperature)
    chosen = []
    for _ in range(6):
        [token] = sample_batch(logits[None], [row])
        assert isinstance(token, int)
        row.append(token)
        chosen.append(token)
    assert 2 not in chosen[:4]
    assert chosen[4:] == [2, 2]


def test_min_tokens_with_nothing_but_stop_tokens_is_an_error_of_that_row() -> None:
    hopeless = row_of(stops=range(5), min_tokens=1)
    bad, good = sample_batch(np.stack([LOGITS, LOGITS]), [hopeless, row_of(temperature=0.0)])
    assert isinstance(bad, InvalidRequestError)
    assert good == 1


def test_the_seed_decides_the_draw_and_so_does_the_position() -> None:
    flat = np.zeros(1000, dtype=np.float32)

    def draws(seed: int) -> list[int]:
        row = row_of(seed=seed)
        tokens = []
        for _ in range(20):
            tokens.append(sample(flat, row))
            row.append(tokens[-1])
        return tokens

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert len(set(draws(1))) > 10
    assert draws(MAX_SEED) == draws(MAX_SEED)


def test_draws_are_the_same_on_every_machine() -> None:
    # numpy keeps Philox's stream stable; these numbers were taken once.
    assert [Draws(7).at(0), Draws(7).at(1), Draws(MAX_SEED).at(10**6)] == [
        0.8720734548204873,
        0.0828426870273763,
        0.1653810847067234,
    ]


# Statistics.


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.2}, {"temperature": 2.0}])
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    count = 4000
    row = row_of(**params)
    expected = probabilities(LOGITS, row)
    tokens = []
    for _ in range(count):
        tokens.append(sample(LOGITS, row))
        row.append(tokens[-1])
    found = np.bincount(tokens, minlength=5)
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(expected))
    kept = expected > 0
    chi_square = ((found - count * expected)[kept] ** 2 / (count * expected[kept])).sum()
    assert chi_square < 18.5  # 0.1 % for 4 degrees of freedom; the seed is fixed


def test_draws_of_different_seeds_are_independent() -> None:
    numbers = np.concatenate([uniforms(seed, 0, 40) for seed in range(40)])
    histogram = np.histogram(numbers, bins=16, range=(0, 1))[0]
    assert ((histogram - 100) ** 2 / 100).sum() < 37.7  # 0.1 % for 15 degrees of freedom
    grid = numbers.reshape(40, 40)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.1


# Batches.


def mixed_rows() -> list[SamplingRow]:
    return [
        row_of(temperature=0.0),
        row_of(seed=1),
        row_of(seed=2, top_p=0.8, prompt=[1, 2, 3], repetition_penalty=1.3),
        row_of(seed=3, top_k=5, min_p=0.1, stops=[0, 4], min_tokens=3),
        row_of(seed=4, min_p=0.01, temperature=1.4),
        row_of(seed=5, typical_p=0.8),
        row_of(seed=6, typical_p=0.7, top_k=60, top_p=0.95, logit_bias={7: 3.0, 11: -100.0}),
        row_of(seed=7, top_k=2000, temperature=2.0, prompt=[5], repetition_penalty=0.7, repeat_last_n=9),
        row_of(temperature=0.0, logit_bias={9: 50.0}),
        row_of(seed=8, top_p=0.999, temperature=1.9),
    ]


def test_a_row_gives_alone_what_it_gives_in_any_batch() -> None:
    rng = np.random.default_rng(0)
    shared, reversed_, single = mixed_rows(), mixed_rows(), mixed_rows()
    for _ in range(30):
        logits = rng.normal(0, rng.uniform(0.5, 4), (len(shared), 3000)).astype(np.float32)
        together = sample_batch(logits, shared)
        alone = [sample_batch(logits[i : i + 1], [row])[0] for i, row in enumerate(single)]
        backwards = sample_batch(logits[::-1], reversed_[::-1])[::-1]
        assert together == alone == backwards
        for rows in (shared, reversed_, single):
            for row, token in zip(rows, together, strict=True):
                assert isinstance(token, int)
                row.append(token)


def test_logits_are_not_modified() -> None:
    logits = np.random.default_rng(0).normal(0, 2, (len(mixed_rows()), 300)).astype(np.float32)
    before = logits.copy()
    logits.setflags(write=False)
    sample_batch(logits, mixed_rows())
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_their_row_only(bad: float, temperature: float) -> None:
    logits = np.stack([LOGITS] * 3)
    logits[1, 3] = bad
    first, second, third = sample_batch(logits, [row_of(temperature=temperature, top_k=1) for _ in range(3)])
    assert (first, third) == (1, 1)
    assert isinstance(second, NonFiniteLogitsError)
    assert "1 logits of 5" in str(second)


def test_an_empty_batch_gives_nothing() -> None:
    assert sample_batch(np.empty((0, 5), dtype=np.float32), []) == []


EXTREMES: list[dict[str, Any]] = [
    {"temperature": 1e-8},
    {"temperature": 1e-60},
    {"top_p": 1e-4},
    {"top_p": 5e-324},
    {"min_p": 1.0},
    {"top_k": 1},
    {"repetition_penalty": 1e-320, "prompt": [1]},
]


@pytest.mark.parametrize("params", EXTREMES)
@pytest.mark.parametrize("scale", [1.0, 1e38])
def test_extreme_values_leave_the_best_token(params: dict[str, Any], scale: float) -> None:
    logits = (LOGITS * np.float32(scale)).astype(np.float32)
    assert set(np.flatnonzero(probabilities(logits, row_of(**params)))) == {1}


def test_a_top_p_just_below_one_keeps_every_token() -> None:
    assert np.count_nonzero(probabilities(LOGITS, row_of(top_p=1 - 2**-53))) == 5


def test_all_logits_equal_leaves_all_tokens() -> None:
    flat = np.full(50, -3.0, dtype=np.float32)
    np.testing.assert_allclose(probabilities(flat, row_of(top_k=7, min_p=1.0)), np.full(50, 0.02))
    assert np.count_nonzero(probabilities(flat, row_of(top_p=0.5))) == 25


# Ranges and defaults.

BAD_VALUES = [
    ("temperature", [-0.1, 2.1, math.nan, math.inf]),
    ("top_k", [-1]),
    ("top_p", [0.0, -0.5, 1.01, math.nan]),
    ("min_p", [-0.01, 1.01, math.nan]),
    ("repetition_penalty", [0.0, -1.0, 2.01, math.nan, math.inf]),
    ("seed", [-1, MAX_SEED + 1, 10**400]),
    ("max_tokens", [-1]),
    ("min_tokens", [-1]),
    ("stop", [("a",) * 17]),
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_VALUES for value in values]
)
def test_a_value_out_of_range_is_refused_with_its_field_named(name: str, value: object) -> None:
    bad = SamplingParams(**{name: value}).violations(vocab_size=10)  # type: ignore[arg-type]
    assert [v.field for v in bad] == [f"sampling.{name}"]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(stop=("ok", "")), "sampling.stop[1]"),
        (SamplingParams(stop=("é" * 513,)), "sampling.stop[0]"),
        (SamplingParams(stop=("\ud800",)), "sampling.stop[0]"),
        (SamplingParams(stop_token_ids=(3, 10)), "sampling.stop_token_ids[1]"),
        (SamplingParams(stop_token_ids=(-1,)), "sampling.stop_token_ids[0]"),
        (SamplingParams(max_tokens=3, min_tokens=4), "sampling.min_tokens"),
    ],
)
def test_a_bad_element_is_refused_with_its_place_named(params: SamplingParams, field: str) -> None:
    assert [v.field for v in params.violations(vocab_size=10)] == [field]


def test_all_bad_fields_are_reported_at_once() -> None:
    params = SamplingParams(
        temperature=9, top_k=-1, top_p=math.nan, seed=-5, stop=("",), stop_token_ids=(99,)
    )
    fields = {v.field.removeprefix("sampling.") for v in params.violations(vocab_size=10)}
    assert fields == {"temperature", "top_k", "top_p", "seed", "stop[0]", "stop_token_ids[0]"}


def test_a_flood_of_bad_ids_is_reported_in_few_lines() -> None:
    bad = SamplingParams(stop_token_ids=(99,) * 100_000).violations(vocab_size=10)
    assert len(bad) == 17
    assert "99984 more" in bad[-1].description


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=2, seed=0, max_tokens=0),
        SamplingParams(
            temperature=2, top_k=10**400, top_p=1e-4, min_p=1, repetition_penalty=1e-3, seed=MAX_SEED
        ),
        SamplingParams(stop=("x" * 1024,) * 16, stop_token_ids=(0, 9), max_tokens=4, min_tokens=4),
    ],
)
def test_values_at_the_edge_of_their_range_are_accepted(params: SamplingParams) -> None:
    assert params.violations(vocab_size=10) == []


@pytest.mark.parametrize("name", ["top_k", "max_tokens", "min_tokens", "temperature", "repeat_last_n"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_field_takes_a_number_that_is_not_finite(name: str, value: float) -> None:
    found = SamplingParams(**{name: value}).violations(vocab_size=10)
    assert f"sampling.{name}" in {one.field for one in found}


def test_a_request_value_wins_over_the_default_and_the_default_over_neutral() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=40)
    resolved = resolve(SamplingParams(temperature=0, min_tokens=2), defaults, lambda: 99)
    assert resolved == ResolvedSampling(
        temperature=0, top_k=40, top_p=1, min_p=0, repetition_penalty=1, min_tokens=2, seed=99
    )
    assert resolve(SamplingParams(), GenerationDefaults(), lambda: 0).temperature == 0


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ResolvedSampling)])
def test_no_field_that_is_asked_for_gets_lost(name: str) -> None:
    value = {7: 0.5} if name == "logit_bias" else 1
    asked = SamplingParams(**{name: value})  # type: ignore[arg-type]
    resolved = resolve(asked, GenerationDefaults(temperature=0.25, top_k=40), lambda: 99)
    assert getattr(resolved, name) == value


def test_a_given_seed_is_kept_and_none_is_drawn() -> None:
    def refuse() -> int:
        raise AssertionError

    assert resolve(SamplingParams(seed=0), GenerationDefaults(), refuse).seed == 0


def test_unusable_defaults_of_an_artifact_are_refused() -> None:
    check_defaults(GenerationDefaults(temperature=0.7, top_p=0.9))
    with pytest.raises(ArtifactError, match=r"generation\.top_p.*generation\.min_p"):
        check_defaults(GenerationDefaults(top_p=0.0, min_p=3.0))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 2},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 0.0, "logit_bias": {4: 50.0}},
    ],
)
def test_ids_that_stand_for_no_token_are_never_chosen(params: dict[str, Any]) -> None:
    """A table of 6 rows, a tokenizer of ids 0 to 3 without 2; the other ids are by far the likeliest."""
    logits = np.array([1.0, 3.0, 8.0, 2.0, 9.0, 9.5], dtype=np.float32)
    drawable = DrawableIds.of(4, {2}, vocab_size=6)
    resolved = ResolvedSampling(**{**NEUTRAL, **params})
    for seed in range(20):
        row = SamplingRow.begin(
            dataclasses.replace(resolved, seed=seed), prompt_ids=(0, 4), stop_ids=(4,), drawable=drawable
        )
        assert sample(logits, row) in {0, 1, 3}
        ids, weights = distribution(logits, row)
        assert set(ids) <= {0, 1, 3}
    if params == {}:
        np.testing.assert_allclose(weights / weights.sum(), softmax(logits[[0, 1, 3]]), rtol=1e-6)


def test_the_logits_of_ids_that_stand_for_no_token_stay_as_they_are() -> None:
    logits = np.array([[1.0, 3.0, 9.0]], dtype=np.float32)
    row = SamplingRow.begin(
        ResolvedSampling(**{**NEUTRAL, "temperature": 0.0}),
        prompt_ids=(),
        stop_ids=(),
        drawable=DrawableIds.of(3, {2}, vocab_size=3),
    )
    assert sample_batch(logits, [row]) == [1]
    assert logits.tolist() == [[1.0, 3.0, 9.0]]


@pytest.mark.parametrize(("tokens", "gaps"), [(6, ()), (9, ()), (9, (7,))])
def test_a_row_looks_at_all_ids_where_each_stands_for_a_token(tokens: int, gaps: tuple[int, ...]) -> None:
    assert DrawableIds.of(tokens, gaps, vocab_size=6) is None
