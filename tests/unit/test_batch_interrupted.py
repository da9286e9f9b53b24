"""A batch that is killed anywhere, and often, ends with each line answered once, as if it never had been.

Each kill is a real one: a child process runs the batch and ends itself in the middle of a write, or between
two of the calls that change files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_serve.batch import appending
from llorch_serve.batch.plan import Order
from support.fakes.batch import FakeAnswerer, run

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

LINES = 24
FAILING = {"q5": 400, "q6": 422, "q17": 404}
CHANGES = ("os.rename", "os.remove", "os.truncate", "os.mkdir", "shutil.rmtree", "fcntl.flock")


def answerer() -> FakeAnswerer:
    """Return one whose answers come in another order than they are asked for."""
    return FakeAnswerer(turns=lambda line: line.number * 31 % 11, statuses=FAILING)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batch") / "in.jsonl"
    lines = [{"custom_id": f"q{n}", "prompt": "é" * (n * 7 % 13)} for n in range(LINES)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def unbroken(source: Path) -> dict[str, bytes]:
    output = source.with_name("unbroken.jsonl")
    run(source, output, answerer(), ordered=True)
    return files_of(output)


def files_of(output: Path) -> dict[str, bytes]:
    return {
        path.name.removeprefix(output.name): path.read_bytes()
        for path in output.parent.iterdir()
        if path.name.startswith(output.name)
    }


class Killer:
    """Ends its process after so many bytes of journal, or so many changes of files."""

    def __init__(self, most_bytes: int | None, most_changes: int | None) -> None:
        self._bytes = most_bytes
        self._changes = most_changes
        self._write = os.write

    def write(self, handle: int, data: bytes) -> int:
        if self._bytes is None:
            return self._write(handle, data)
        fits = min(len(data), self._bytes)
        written = self._write(handle, data[:fits])
        self._bytes -= written
        if written < len(data):
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        is_writing = event == "open" and str(arguments[1]) not in ("None", "r", "rb")
        is_change = event in CHANGES or is_writing
        if self._changes is not None and is_change:
            self._changes -= 1
            if self._changes < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def run_and_kill(killer: Killer, source: Path, output: Path, order: Order, *, ordered: bool) -> bool:
    """Run a batch in a process of its own; return whether it was killed."""
    child = os.fork()
    if child == 0:
        appending.os.write = killer.write  # type: ignore[attr-defined, assignment]
        sys.addaudithook(killer.hook)
        with contextlib.suppress(BaseException):
            run(source, output, answerer(), order=order, ordered=ordered)
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


KILLS = st.lists(
    st.tuples(st.integers(0, 5000), st.none()) | st.tuples(st.none(), st.integers(0, 30)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=25)
@given(kills=KILLS, order=st.sampled_from(Order), ordered=st.booleans())
def test_killed_anywhere_and_gone_on_with(
    source: Path,
    unbroken: dict[str, bytes],
    kills: list[tuple[int | None, int | None]],
    order: Order,
    ordered: bool,
) -> None:
    folder = source.parent / "killed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    output = folder / "unbroken.jsonl"
    for kill in kills:
        run_and_kill(Killer(*kill), source, output, order, ordered=ordered)
    assert run(source, output, answerer(), order=order, ordered=ordered).is_complete
    found = files_of(output)
    if ordered:
        assert found == unbroken
    for name in ("", ".errors.jsonl"):
        assert sorted(found[name].splitlines()) == sorted(unbroken[name].splitlines())
    assert sorted(path.name for path in folder.iterdir()) == sorted(output.name + name for name in unbroken)


def test_kills_do_kill(source: Path, tmp_path: Path) -> None:
    kills = [Killer(3000, None), *(Killer(None, changes) for changes in range(8))]
    for number, killer in enumerate(kills):
        assert run_and_kill(killer, source, tmp_path / f"{number}.jsonl", Order.GIVEN, ordered=False)


@settings(max_examples=30)
@given(data=st.data())
def test_whatever_a_power_cut_leaves_of_both_files(
    source: Path, unbroken: dict[str, bytes], data: st.DataObject
) -> None:
    folder = source.parent / "cut"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    output = folder / "unbroken.jsonl"
    for name, content in unbroken.items():
        cut = len(content) if name == ".run.json" else data.draw(st.integers(0, len(content)))
        output.with_name(output.name + name).write_bytes(content[:cut])
    run(source, output, answerer(), ordered=True)
    assert files_of(output) == unbroken
