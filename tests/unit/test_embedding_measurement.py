"""Cosines of vectors with a reference's: each at its text's place, and all of them held to the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from llorch_export.verify.embeddings import compared
from llorch_serve.runtime.embedding_session import EmbeddingSession

LENGTHS = (40, 1, 7, 23, 2, 90, 3, 60, 1, 5)
TEXTS = [[length + 100 * place] * length for place, length in enumerate(LENGTHS)]


def vector(text: Sequence[int]) -> npt.NDArray[np.float64]:
    return np.array([len(text), text[0], 1.0])


class Recording:
    """Gives each text the expected vector, but that of one text in another direction."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def embed(self, texts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        self.batches.append(list(map(len, texts)))
        return np.array([vector(t) * ((-1) if len(t) == 23 else 1) for t in texts], np.float32)


def test_texts_of_about_one_length_run_together_and_cosines_keep_their_places() -> None:
    session = Recording()
    cosines, errors = compared(cast("EmbeddingSession", session), TEXTS, vector)
    expected = np.where(np.array(LENGTHS) == 23, -1, 1)
    np.testing.assert_allclose(cosines, expected, atol=1e-6)
    np.testing.assert_allclose(errors, 1 - expected, atol=1e-6)
    assert [length for batch in session.batches for length in batch] == sorted(LENGTHS)


@pytest.mark.parametrize(
    ("fp32", "default", "short"),
    [(1.0, 1.0, []), (1.0, 0.873, ["default"]), (0.9999, 0.9999, ["fp32"]), (0.5, 0.5, ["fp32", "default"])],
)
def test_one_text_below_what_is_asked_is_enough(fp32: float, default: float, short: list[str]) -> None:
    from measure.embeddings import short_of

    near = {"fp32": fp32, "default": default, "int8": 0.5}
    assert short_of({name: {"mean": 1.0, "lowest": lowest} for name, lowest in near.items()}) == short
