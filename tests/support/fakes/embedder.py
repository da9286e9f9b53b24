"""A session without a model that embeds texts: a vector says which tokens it was made of."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llorch_serve.providers import Placement

SIZE = 64


def vector_of(text: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the vector of a text, of length 1."""
    seed = int.from_bytes(hashlib.sha256(repr(list(text)).encode()).digest()[:8])
    vector = np.random.default_rng(seed).normal(size=SIZE)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


class FakeEmbedder:
    """batches: the texts of every call. gate: calls wait for it. fail: what the next calls raise.

    spoiled: texts whose vector is not finite.
    """

    def __init__(self, context: int = 48) -> None:
        self.context = context
        self.placement = Placement("FakeExecutionProvider", 1.0, ())
        self.batches: list[list[tuple[int, ...]]] = []
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.fail: Exception | None = None
        self.spoiled: set[tuple[int, ...]] = set()

    def embed(self, texts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        self.batches.append([tuple(text) for text in texts])
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(20)
        if self.fail is not None:
            raise self.fail
        found = np.stack([vector_of(text) for text in texts])
        found[[tuple(text) in self.spoiled for text in texts], 3] = np.nan
        return found
