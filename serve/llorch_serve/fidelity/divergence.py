"""How far one model's logits are from another's: Kullback-Leibler divergence, agreement of the likeliest
token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Distance of a model from its reference over some positions.

    kl: mean of KL(reference || model) in nats.
    top1: share of positions where both find the same token likeliest, 0..1.
    max_abs: largest absolute difference of two logits.
    tokens: positions compared.
    """

    kl: float
    top1: float
    max_abs: float
    tokens: int


class DivergenceSum:
    """Adds up positions, piece by piece, in float64."""

    def __init__(self) -> None:
        self._kl = 0.0
        self._same = 0
        self._max_abs = 0.0
        self._tokens = 0

    def add(self, reference: Logits, model: Logits) -> None:
        """Compare logits [positions, vocabulary]."""
        expected, found = log_softmax(reference), log_softmax(model)
        self._kl += float((np.exp(expected) * (expected - found)).sum())
        self._same += int((reference.argmax(axis=1) == model.argmax(axis=1)).sum())
        self._max_abs = max(self._max_abs, float(np.abs(reference - model).max()))
        self._tokens += len(reference)

    def result(self) -> Divergence:
        """Return the figures over everything added; at least one position must have been."""
        return Divergence(self._kl / self._tokens, self._same / self._tokens, self._max_abs, self._tokens)


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    """Return log-probabilities in float64 along the last axis."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted
