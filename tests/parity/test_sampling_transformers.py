"""The sampler's distributions are those of transformers' processors and warpers, applied in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llorch_serve.sampling.params import ResolvedSampling
from llorch_serve.sampling.sampler import SamplingRow, distribution, sample_batch

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.reference

PROMPT = [3, 5, 8, 13, 3]
ANSWER = [21, 5]
STOPS = [2, 7, 40]

CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 10**9},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"typical_p": 0.2},
    {"typical_p": 0.95},
    {"repetition_penalty": 1.3, "repeat_last_n": 3},
    {"repetition_penalty": 1.3, "repeat_last_n": 0},
    {"presence_penalty": 1.5, "frequency_penalty": -0.7},
    {"logit_bias": {2: 100.0, 9: -100.0, 63: 3.5}},
    {"min_tokens": 2},
    {"min_tokens": 3},
    {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.02,
        "typical_p": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "logit_bias": {21: 1.0},
        "min_tokens": 5,
    },
    {"temperature": 1.5, "top_k": 200, "top_p": 0.5, "repetition_penalty": 1.9, "min_tokens": 3},
]


NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repeat_last_n": -1,
    "logit_bias": {},
    "min_tokens": 0,
}


def reference(
    logits: np.ndarray, params: dict[str, Any], prompt: Sequence[int] = PROMPT, answer: Sequence[int] = ANSWER
) -> np.ndarray:
    """Return transformers' probabilities; presence and frequency penalty, which it lacks, from their
    definition.
    """
    # float64, so that only the rules are compared and not the rounding of a sum over the vocabulary.
    scores = torch.tensor(logits[None].astype(np.float64))
    ids = torch.tensor([[*prompt, *answer]])
    window = params["repeat_last_n"] if params["repeat_last_n"] >= 0 else ids.shape[1]
    recent = ids[:, max(ids.shape[1] - window, 0) :]
    if params["logit_bias"]:
        bias = [[[token], float(value)] for token, value in params["logit_bias"].items()]
        scores = transformers.SequenceBiasLogitsProcessor(bias)(ids, scores)
    if params["repetition_penalty"] != 1 and window:
        scores = transformers.RepetitionPenaltyLogitsProcessor(params["repetition_penalty"])(recent, scores)
    counts = np.bincount(list(answer[max(len(answer) - window, 0) :]), minlength=len(logits))
    scores = scores - torch.tensor(
        params["frequency_penalty"] * counts + params["presence_penalty"] * (counts > 0)
    )
    if params["min_tokens"]:
        scores = transformers.MinNewTokensLengthLogitsProcessor(
            len(prompt), params["min_tokens"], STOPS, device="cpu"
        )(ids, scores)
    steps = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(params["temperature"])])
    if params["top_k"]:
        steps.append(transformers.TopKLogitsWarper(params["top_k"]))
    if params["top_p"] < 1:
        steps.append(transformers.TopPLogitsWarper(params["top_p"]))
    if params["min_p"]:
        steps.append(transformers.MinPLogitsWarper(params["min_p"]))
    if params["typical_p"] < 1:
        steps.append(transformers.TypicalLogitsWarper(params["typical_p"]))
    return steps(ids, scores).softmax(dim=-1)[0].numpy()


def row_of(
    params: dict[str, Any], prompt: Sequence[int], answer: Sequence[int], seed: int = 0
) -> SamplingRow:
    row = SamplingRow.begin(ResolvedSampling(**params, seed=seed), prompt_ids=prompt, stop_ids=STOPS)
    for token in answer:
        row.append(token)
    return row


def probabilities(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    ids, weights = distribution(logits, row)
    found = np.zeros(len(logits))
    found[ids] = weights / weights.sum()
    return found


def test_the_order_is_that_of_transformers() -> None:
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=64
    )
    generation = transformers.GenerationConfig(
        do_sample=True,
        sequence_bias=[[[3], 1.0]],
        repetition_penalty=1.2,
        min_new_tokens=2,
        eos_token_id=2,
        temperature=0.8,
        top_k=10,
        top_p=0.9,
        min_p=0.1,
        typical_p=0.9,
    )
    generation._eos_token_tensor = torch.tensor([2])
    model = transformers.LlamaForCausalLM(config)
    steps = model._get_logits_processor(generation, input_ids_seq_length=4, device="cpu")
    assert [type(step).__name__ for step in steps] == [
        "SequenceBiasLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
    ]


@pytest.mark.parametrize("vocab", [64, 4000])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: ",".join(f"{k}={v}" for k, v in case.items()) or "neutral"
)
def test_distribution_equals_transformers(case: dict[str, Any], vocab: int) -> None:
    params = {**NEUTRAL, **case}
    logits = np.random.default_rng(vocab).normal(0, 3, vocab).astype(np.float32)
    logits[STOPS] += 5
    found = probabilities(logits, row_of(params, PROMPT, ANSWER))
    expected = reference(logits, params)
    assert_same(found, expected, 2e-5)


def assert_same(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """The same tokens with the same probabilities; less than float32's smallest normal number may be none at
    all.
    """
    np.testing.assert_array_equal(found > 1e-37, expected > 1e-37)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-37)


TOKENS = st.lists(st.integers(0, 47), max_size=12)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0.05, 2),
        "top_k": st.sampled_from([1, 2, 7, 40, 300, 2000, 10**9]),
        "top_p": st.floats(0.01, 1),
        "min_p": st.floats(0, 1),
        "typical_p": st.floats(0.01, 1),
        "repetition_penalty": st.floats(0.1, 2),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repeat_last_n": st.integers(-1, 15),
        "logit_bias": st.dictionaries(st.integers(0, 47), st.floats(-100, 100), max_size=5),
        "min_tokens": st.integers(0, 12),
    },
)


def rounding(logits: np.ndarray, params: dict[str, Any]) -> float:
    """Return how far float32 may move a probability, relatively: by as much as the largest score is rounded.

    exp(x + e) = exp(x)(1 + e + ...), and scores reach thousands where a bias is divided by a low temperature.
    """
    largest = np.abs(logits).max() + max(map(abs, params["logit_bias"].values()), default=0)
    largest *= max(params["repetition_penalty"], 1 / params["repetition_penalty"])
    largest += abs(params["presence_penalty"]) + 12 * abs(params["frequency_penalty"])
    return float(4 * np.finfo(np.float32).eps * largest / params["temperature"])


def is_clear(logits: np.ndarray, params: dict[str, Any], *texts: Sequence[int]) -> bool:
    """Return whether no token is so near to an edge of a filter that rounding may decide."""
    kept = reference(logits, params, *texts) > 0
    nearby = 1e-5 + rounding(logits, params)
    for name in ("top_p", "min_p", "typical_p"):
        for factor in (1 - nearby, 1 + nearby):
            moved = {**params, name: min(params[name] * factor, 1.0)}
            if not np.array_equal(reference(logits, moved, *texts) > 0, kept):
                return False
    return True


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([48, 200, 3001]),
    spread=st.floats(0.1, 8),
    prompt=TOKENS.filter(bool),
    answer=TOKENS,
    changes=PARAMS,
)
def test_any_combination_equals_transformers(
    seed: int, vocab: int, spread: float, prompt: list[int], answer: list[int], changes: dict[str, Any]
) -> None:
    params = {**NEUTRAL, **changes}
    logits = np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)
    assume(is_clear(logits, params, prompt, answer))
    found = probabilities(logits, row_of(params, prompt, answer))
    expected = reference(logits, params, prompt, answer)
    assert_same(found, expected, 1e-4 + rounding(logits, params))


DRAWS = 3200
DRAWN: list[dict[str, Any]] = [
    {},
    {"temperature": 1.8},
    {"top_k": 12, "top_p": 0.9},
    {"top_p": 0.97, "temperature": 0.7},
    {"min_p": 0.05, "typical_p": 0.8},
    {"typical_p": 0.6},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": -0.5, "repeat_last_n": 4},
    {"logit_bias": {5: 4.0, 21: -3.0}, "min_tokens": 9, "top_k": 30},
]


@pytest.mark.parametrize("vocab", [60, 5000])
@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_draws_follow_transformers_probabilities(case: dict[str, Any], vocab: int) -> None:
    """Pearson's chi-square of 3200 draws, one for each seed, in bins of neighbouring ids."""
    params = {**NEUTRAL, **case}
    logits = np.random.default_rng(vocab).normal(0, 2, vocab).astype(np.float32)
    expected = reference(logits, params)
    drawn: list[int] = []
    for first in range(0, DRAWS, 64):
        rows = [row_of(params, PROMPT, ANSWER, seed) for seed in range(first, first + 64)]
        for token in sample_batch(np.broadcast_to(logits, (64, vocab)), rows):
            assert isinstance(token, int)
            drawn.append(token)
    found = np.bincount(drawn, minlength=vocab)
    assert not found[expected == 0].any()
    kept = np.flatnonzero(expected)
    # Bins close as soon as they expect 20 draws, so that none has too few.
    bins = np.floor(expected[kept].cumsum() * DRAWS / 20).astype(int)
    wanted = np.bincount(bins, weights=expected[kept] * DRAWS)
    counted = np.bincount(bins, weights=found[kept])
    filled = wanted > 0
    if filled.sum() > 1:
        statistic = ((counted - wanted)[filled] ** 2 / wanted[filled]).sum()
        # The seeds are fixed, so this passes always or never: 0.01 % of right samplers would fail here.
        assert statistic < chi_square_limit(int(filled.sum()) - 1)


def chi_square_limit(freedom: int) -> float:
    """Return about the 99.99 % quantile of the chi-square distribution (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 3.719 * spread**0.5) ** 3)
