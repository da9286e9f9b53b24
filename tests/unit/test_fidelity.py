"""Divergence figures, against formulas and worked examples."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llorch_serve.fidelity.divergence import DivergenceSum, log_softmax


def logits(*probabilities: float) -> np.ndarray:
    return np.log(np.array([probabilities], np.float32))


def test_a_model_does_not_diverge_from_itself() -> None:
    values = np.random.default_rng(0).standard_normal((5, 100)).astype(np.float32)
    total = DivergenceSum()
    total.add(values, values)
    found = total.result()
    assert (found.kl, found.top1, found.max_abs, found.tokens) == (0.0, 1.0, 0.0, 5)


def test_kl_of_two_known_distributions_in_nats() -> None:
    total = DivergenceSum()
    total.add(logits(0.5, 0.5), logits(0.25, 0.75))
    assert total.result().kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-7)


def test_the_reference_comes_first() -> None:
    """KL is not symmetric: what the reference finds likely weighs."""
    forward, backward = DivergenceSum(), DivergenceSum()
    forward.add(logits(0.9, 0.1), logits(0.5, 0.5))
    backward.add(logits(0.5, 0.5), logits(0.9, 0.1))
    assert forward.result().kl == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), abs=1e-7)
    assert backward.result().kl == pytest.approx(0.5 * math.log(5 / 9) + 0.5 * math.log(5), abs=1e-7)


def test_a_shift_of_all_logits_changes_max_abs_only() -> None:
    values = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    total = DivergenceSum()
    total.add(values, values + np.float32(4))
    found = total.result()
    assert found.kl == pytest.approx(0, abs=1e-9)
    assert found.max_abs == pytest.approx(4, abs=1e-5)


def test_pieces_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(0)
    reference, model = (rng.standard_normal((30, 40)).astype(np.float32) for _ in range(2))
    whole, parts = DivergenceSum(), DivergenceSum()
    whole.add(reference, model)
    for start, stop in ((0, 1), (1, 20), (20, 30)):
        parts.add(reference[start:stop], model[start:stop])
    assert parts.result().kl == pytest.approx(whole.result().kl, rel=1e-12)
    assert (parts.result().top1, parts.result().max_abs) == (whole.result().top1, whole.result().max_abs)
    assert parts.result().tokens == 30


def test_top1_counts_positions_with_the_same_likeliest_token() -> None:
    total = DivergenceSum()
    total.add(np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32)[[0, 1, 3, 2]])
    assert total.result().top1 == 0.5


def test_nan_in_the_model_is_never_a_small_divergence() -> None:
    model = np.zeros((1, 4), np.float32)
    model[0, 2] = np.nan
    total = DivergenceSum()
    total.add(np.zeros((1, 4), np.float32), model)
    assert math.isnan(total.result().kl)
    assert not total.result().kl <= 1e9


def test_large_logits_do_not_overflow() -> None:
    found = log_softmax(np.array([[3e38, 0.0], [-3e38, 0.0]], np.float32))
    assert np.exp(found).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert found.dtype == np.float64
