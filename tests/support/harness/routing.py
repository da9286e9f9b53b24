"""Whether tests of the fronts reach a generator as a worker's front does, or through a replica."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from support.fakes.generator import DRAWN_SEED, PATIENCE_S
from support.fakes.replicas import routed

T = TypeVar("T")

WAYS = ("worker", "replicas")
_chosen = ["worker"]


@contextmanager
def going(way: str) -> Iterator[None]:
    """Have every front go this way."""
    _chosen.append(way)
    try:
        yield
    finally:
        _chosen.pop()


def seen(way: str, look: Callable[[], T], wanted: T) -> T:
    """Return what ``look`` sees. How busy replicas are is told as of the last look at them, so through them
    it is looked again until it is what is wanted.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (found := look()) != wanted and way == "replicas" and time.monotonic() < deadline:
        pass
    return found


@contextmanager
def reached(generator: Any) -> Iterator[Any]:
    """Give what a front is to be given for a generator."""
    if generator is None or _chosen[-1] == "worker":
        yield generator
        return
    front = routed(generator, draw_seed=lambda: DRAWN_SEED, load_interval_s=0.02)
    try:
        yield front
    finally:
        front.close()
