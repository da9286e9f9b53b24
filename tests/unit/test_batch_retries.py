"""A batch asks again where that may help, as late as it was told to, and ends where nobody answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llorch_serve.batch.answering import BatchStoppedError, LineAnswer
from llorch_serve.batch.journal import Journal
from llorch_serve.batch.lines import BatchLine
from llorch_serve.batch.records import Record
from llorch_serve.batch.retries import Clock
from llorch_serve.batch.run import Limits
from support.fakes.batch import FakeAnswerer, FakeClock, run


def refusal(status: int, retry_after_s: float | None = None) -> LineAnswer:
    return LineAnswer(status, "req", b'{"error": {"message": "no room"}}', retry_after_s)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"custom_id": f"q{n}", "prompt": "x"}) + "\n" for n in range(3)))
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.mark.parametrize("status", [429, 503])
def test_a_line_that_was_refused_is_asked_for_again_and_waits_as_told(
    source: Path, output: Path, status: int
) -> None:
    refused = [refusal(status, 7.5), refusal(status), refusal(status), refusal(status, 0.0)]
    clock = FakeClock()
    summary = run(source, output, FakeAnswerer({"q1": refused}), clock=clock)
    assert (summary.answered, summary.failed, summary.retries) == (3, 0, 4)
    assert clock.waited == [7.5, 1.0, 2.0, 0.0]


@pytest.mark.parametrize("status", [408, 500, 502, 504])
def test_a_failure_of_the_other_side_is_tried_a_few_times(source: Path, output: Path, status: int) -> None:
    clock = FakeClock()
    answerer = FakeAnswerer({"q0": [refusal(status)] * 2, "q1": [refusal(status)] * 5})
    summary = run(source, output, answerer, clock=clock)
    assert (summary.answered, summary.failed, summary.retries) == (2, 1, 4)
    (failed,) = map(json.loads, output.with_name("out.jsonl.errors.jsonl").read_text().splitlines())
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("q1", status)
    assert sorted(clock.waited) == [0.5, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("status", [400, 403, 404, 413, 422, 501])
def test_a_line_that_is_wrong_is_asked_for_once(source: Path, output: Path, status: int) -> None:
    answerer = FakeAnswerer(statuses={"q1": status})
    assert run(source, output, answerer).failed == 1
    assert sorted(answerer.asked) == ["q0", "q1", "q2"]


def test_waits_grow_to_half_a_minute_and_spread(source: Path, output: Path) -> None:
    clock = FakeClock()
    spread = Clock(now=clock.clock().now, sleep=clock.clock().sleep, random=lambda: 1.0)
    waits = FakeClock()
    waits.clock = lambda: spread  # type: ignore[method-assign]
    run(
        source,
        output,
        FakeAnswerer({"q0": [refusal(503)] * 9}),
        clock=waits,
        limits=Limits(lines_in_flight=1, patience_s=1e6),
    )
    assert clock.waited == [0.75, 1.5, 3.0, 6.0, 12.0, 24.0, 45.0, 45.0, 45.0]


def test_nobody_answers_for_too_long(source: Path, output: Path) -> None:
    clock = FakeClock()
    answerer = FakeAnswerer({"q1": [refusal(503, 40.0)] * 99})
    with pytest.raises(BatchStoppedError) as found:
        run(source, output, answerer, clock=clock, limits=Limits(lines_in_flight=3, patience_s=100))
    told = str(found.value)
    assert told.startswith("no line was answered for 100 s; line 2 was refused last: 503 {")
    assert told.endswith("run the same command again to go on")
    assert clock.waited == [40.0] * 4  # the third line is answered while the second waits for the first time
    done = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    assert sorted(done) == ["q0", "q2"]
    answerer = FakeAnswerer()
    assert run(source, output, answerer).is_complete
    assert answerer.asked == ["q1"]


def test_a_line_that_ends_the_worker_each_time_fails_in_the_end(tmp_path: Path, output: Path) -> None:
    source = tmp_path / "many.jsonl"
    source.write_text("".join(json.dumps({"custom_id": f"q{n}", "prompt": "x"}) + "\n" for n in range(200)))
    clock = FakeClock()
    answerer = FakeAnswerer({"q1": [refusal(503, 20.0)] * 200})
    summary = run(source, output, answerer, clock=clock, limits=Limits(lines_in_flight=2, patience_s=100))
    assert (summary.answered, summary.failed) == (199, 1)
    (failed,) = map(json.loads, output.with_name("out.jsonl.errors.jsonl").read_text().splitlines())
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("q1", 503)
    assert 100 <= sum(clock.waited) < 2000


def test_a_wait_longer_than_patience_is_not_believed(source: Path, output: Path) -> None:
    clock = FakeClock()
    run(source, output, FakeAnswerer({"q1": [refusal(429, 1e9), refusal(429, -5.0)]}), clock=clock)
    assert clock.waited == [300.0, 0.0]


def test_a_worker_that_is_busy_with_a_long_answer_is_waited_for(source: Path, output: Path) -> None:
    clock = FakeClock()
    answerer = FakeAnswerer(
        {"q1": [refusal(429, 50.0)] * 20}, turns=lambda line: 200 if line.custom_id == "q0" else 0
    )
    summary = run(source, output, answerer, clock=clock, limits=Limits(lines_in_flight=2, patience_s=100))
    assert summary.is_complete
    assert sum(clock.waited) == 1000


def test_a_caller_that_is_not_known_ends_the_batch(source: Path, output: Path) -> None:
    with pytest.raises(BatchStoppedError, match="line 1 was refused: 401"):
        run(source, output, FakeAnswerer(statuses={"q0": 401}), limits=Limits(lines_in_flight=1))
    assert output.read_bytes() == b""


def test_what_ends_the_batch_leaves_what_was_answered(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_ending = threading.Event()
    write = Journal.write

    def slowly(journal: Journal, records: Sequence[Record]) -> None:
        is_ending.wait()
        write(journal, records)

    class Ending(FakeAnswerer):
        async def answer(self, line: BatchLine) -> LineAnswer:
            answer = await super().answer(line)
            if line.custom_id == "q2":
                is_ending.set()
                raise BatchStoppedError("the model is another one now")
            return answer

    monkeypatch.setattr(Journal, "write", slowly)
    with pytest.raises(BatchStoppedError, match="another one now"):
        run(source, output, Ending(turns=lambda line: 20 * (line.number - 1)))
    assert output.read_bytes().count(b"\n") == 2


def test_what_the_disk_has_not_begun_to_write_when_the_batch_ends_is_written(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed, may_write = threading.Event(), threading.Event()

    class BusyThread(ThreadPoolExecutor):
        """Of the disk: it begins what it is given first when it is given more."""

        def submit(self, work, /, *arguments):  # type: ignore[no-untyped-def,override]
            if self._thread_name_prefix != "batch-disk":
                return super().submit(work, *arguments)
            if handed.is_set():
                may_write.set()
            else:
                super().submit(may_write.wait)
                handed.set()
            return super().submit(work, *arguments)

    class Ending(FakeAnswerer):
        async def answer(self, line: BatchLine) -> LineAnswer:
            while line.custom_id != "q0" and not handed.is_set():
                await asyncio.sleep(0)
            if line.custom_id != "q0":
                raise BatchStoppedError("the model is another one now")
            return await super().answer(line)

    monkeypatch.setattr("llorch_serve.batch.run.ThreadPoolExecutor", BusyThread)
    with pytest.raises(BatchStoppedError, match="another one now"):
        run(source, output, Ending())
    assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == ["q0"]
