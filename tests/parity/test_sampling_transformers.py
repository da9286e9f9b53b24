"""The sampler's distributions are those of transformers' processors and warpers, applied in their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llorch_serve.sampler import SamplingRow, distribution
from llorch_serve.sampling import ResolvedSampling

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
    {"min_tokens": 2},
    {"min_tokens": 3},
    {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "min_tokens": 5,
    },
    {"temperature": 1.5, "top_k": 200, "top_p": 0.5, "repetition_penalty": 1.9, "min_tokens": 3},
]


def reference(logits: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    ids = torch.tensor([PROMPT + ANSWER])
    steps = transformers.LogitsProcessorList()
    if params["repetition_penalty"] != 1:
        steps.append(transformers.RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    if params["min_tokens"]:
        steps.append(
            transformers.MinNewTokensLengthLogitsProcessor(
                len(PROMPT), params["min_tokens"], STOPS, device="cpu"
            )
        )
    steps.append(transformers.TemperatureLogitsWarper(params["temperature"]))
    if params["top_k"]:
        steps.append(transformers.TopKLogitsWarper(params["top_k"]))
    if params["top_p"] < 1:
        steps.append(transformers.TopPLogitsWarper(params["top_p"]))
    if params["min_p"]:
        steps.append(transformers.MinPLogitsWarper(params["min_p"]))
    # float64, so that only the rules are compared and not the rounding of a sum over the vocabulary.
    scores = steps(ids, torch.tensor(logits[None].astype(np.float64)))
    return scores.softmax(dim=-1)[0].numpy()


@pytest.mark.parametrize("vocab", [64, 4000])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: ",".join(f"{k}={v}" for k, v in case.items()) or "neutral"
)
def test_distribution_equals_transformers(case: dict[str, Any], vocab: int) -> None:
    neutral = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
    }
    params = {**neutral, **case}
    logits = np.random.default_rng(vocab).normal(0, 3, vocab).astype(np.float32)
    logits[STOPS] += 5
    row = SamplingRow.begin(ResolvedSampling(**params, seed=0), prompt_ids=PROMPT, stop_ids=STOPS)
    for token in ANSWER:
        row.append(token)
    ids, weights = distribution(logits, row)
    found = np.zeros(vocab)
    found[ids] = weights / weights.sum(dtype=np.float64)
    expected = reference(logits, params)
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=2e-5)
