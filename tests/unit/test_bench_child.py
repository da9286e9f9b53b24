"""The process of an entry from inside: each question's answer, and failures as answers, around the fake
session.
"""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from llorch_serve.bench import child
from llorch_serve.bench.child import Child, serve
from llorch_serve.bench.energy import EnergyMeter
from llorch_serve.bench.process import EntryProcess
from llorch_serve.bench.protocol import (
    PROTOCOL,
    Answer,
    Close,
    Closed,
    Failed,
    Open,
    Opened,
    Question,
    Ran,
    Run,
    Settings,
)
from llorch_serve.bench.schema import OfflineTest
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ProviderError, ResourceError
from support.harness.worker import CONTEXT, make_session, make_worker

TEST = OfflineTest(work="mixed", prompt_tokens=4, generated_tokens=3, streams=2)
DEEP = OfflineTest(work="decode", prompt_tokens=2, generated_tokens=3, streams=1, depth=40)


def opening(longest: int = 20) -> Open:
    return Open(
        label="here",
        folder="folder",
        tokenizer=None,
        settings=Settings.of(SessionConfig(threads=3)),
        prompt_ids=None,
        longest=longest,
    )


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    monkeypatch.setattr(child, "load_worker", lambda *_, **__: make_worker(tmp_path, make_session()))
    made = Child(EnergyMeter((), "no counters"))
    yield made
    made.close()


def test_a_model_is_opened_run_and_closed(inside: Child) -> None:
    opened = inside.answer(opening())
    assert isinstance(opened, Opened)
    entry = opened.entry
    assert (entry.label, entry.provider, entry.threads) == ("here", "FakeExecutionProvider", 3)
    assert entry.model is not None
    assert (entry.model.model_id, entry.model.precision, entry.model.target) == ("tiny", "fp32", "cpu")
    assert entry.model.folder_bytes is not None
    assert entry.energy is not None
    assert (entry.energy.sources, entry.energy.absent) == ((), "no counters")
    ran = inside.answer(Run(test=TEST))
    assert isinstance(ran, Ran)
    assert ran.values["tokens_per_s"] > 0
    closed = inside.answer(Close())
    assert isinstance(closed, Closed)
    assert closed.peak_rss_mib > 10


def test_a_context_that_is_too_short_is_told_before_anything_runs(inside: Child) -> None:
    found = inside.answer(opening(CONTEXT + 1))
    assert isinstance(found, Failed)
    assert found.problem.exit_code == 2
    assert f"needs a context of {CONTEXT + 1} tokens; this one has {CONTEXT}" in found.problem.message


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ProviderError("the wheel\nis missing"), 4, "the wheel is missing"),
        (ResourceError("too big"), 6, "too big"),
        (MemoryError(), 6, "memory does not suffice"),
        (ValueError("odd"), 1, "unexpected ValueError: odd"),
    ],
)
def test_failures_have_the_exit_code_of_their_class(
    inside: Child, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, says: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(child, "load_worker", fail)
    found = inside.answer(opening())
    assert isinstance(found, Failed)
    assert found.problem.exit_code == code
    assert found.problem.message.startswith(says)
    assert not found.goes_on


def test_a_test_that_the_engine_cannot_do_leaves_the_others(inside: Child, tmp_path: Path) -> None:
    inside.answer(opening())
    assert inside._offline is not None
    inside._offline._ids = (1,) * 3
    odd = msgspec.structs.replace(DEEP, depth=4)  # too short a prefix to be taken up
    found = inside.answer(Run(test=odd))
    assert isinstance(found, Failed)
    assert (found.goes_on, found.problem.exit_code) == (True, 4)
    assert isinstance(inside.answer(Run(test=TEST)), Ran)


def test_questions_and_answers_are_lines(inside: Child) -> None:
    questions: list[Question] = [opening(), Run(test=TEST), Close()]
    written = io.BytesIO()
    serve(io.BytesIO(b"".join(msgspec.json.encode(one) + b"\n" for one in questions)), written, inside)
    answers = [msgspec.json.decode(line, type=Answer) for line in written.getvalue().splitlines()]
    assert [type(answer).__name__ for answer in answers] == ["Ready", "Opened", "Ran", "Closed"]
    assert answers[0].protocol == PROTOCOL  # type: ignore[union-attr]


def test_what_libraries_print_does_not_stand_between_answers() -> None:
    script = """
        import os
        from llorch_serve.bench import child
        def noisy():
            os.write(1, b'a library speaks\\n')
            print('python too', flush=True)
            return None
        child.find_energy = noisy
        child.main()
        """
    lines: list[str] = []
    process = EntryProcess(
        sys.executable, lines.append, command=[sys.executable, "-c", textwrap.dedent(script)]
    )
    process.greet()
    process.close()
    assert sorted(lines) == ["a library speaks", "python too"]
