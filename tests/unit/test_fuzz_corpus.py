"""Every fuzz target on the inputs that are kept for it: those it starts from, and those that once broke
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.limits import TooSlowError, timed
from fuzz.mutation import mutate
from fuzz.targets import CORPUS, TARGETS, runner

KEPT = [(path.parent.name, path) for path in sorted(CORPUS.glob("*/*"))]
CHANGES = 60


@pytest.mark.parametrize(("name", "path"), KEPT, ids=[f"{name}/{path.name}" for name, path in KEPT])
def test_an_input_is_read_or_refused_and_nothing_else(name: str, path: Path) -> None:
    runner(name)(path.read_bytes())


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_changed_input_is_read_or_refused_and_nothing_else(name: str) -> None:
    run, ran = runner(name), 0
    for path in sorted((CORPUS / name).iterdir()):
        data = path.read_bytes()
        for seed in range(CHANGES):
            changed = mutate(data, seed) if TARGETS[name].json else _cut(data, seed)
            if changed is not None:
                run(changed)
                ran += 1
    assert ran >= CHANGES


def test_a_slow_input_is_a_finding() -> None:
    now = iter((10.0, 10.9, 20.0, 21.1))
    run = timed(lambda _: None, clock=lambda: next(now))
    run(b"")
    with pytest.raises(TooSlowError, match=r"1\.10 s of processor time for 3 bytes"):
        run(b"abc")


def test_every_target_has_inputs_to_begin_from() -> None:
    assert {name for name, _ in KEPT} == set(TARGETS)


def _cut(data: bytes, seed: int) -> bytes:
    """Return the data with one byte changed, cut short, or with a part of it twice, by turns."""
    place = (seed * 2654435761) % max(len(data), 1)
    if seed % 3 == 0:
        return data[:place]
    if seed % 3 == 1:
        return data[:place] + bytes([(data[place] + 1 + seed) % 256]) + data[place + 1 :]
    return data[:place] + data[place // 2 :]
