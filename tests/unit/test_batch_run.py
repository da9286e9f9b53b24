"""A batch answers each line exactly once, whatever order it works in and whatever it is refused meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from llorch_serve.batch import run as batch_run
from llorch_serve.batch.answering import LineAnswer, Usage
from llorch_serve.batch.lines import BatchLine
from llorch_serve.batch.plan import ORDERED_BLOCK, Order
from llorch_serve.batch.run import Limits, run_batch
from llorch_serve.batch.summary import Summary
from support.fakes.batch import LIMITS, FakeAnswerer, FakeClock, opened, run


def chat(custom_id: str, text: str, **more: object) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", *(chat(f"q-{n}", "x" * (n * 7 % 40)) for n in range(60)))


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("ordered", [False, True])
def test_each_line_is_answered_once(tmp_path: Path, source: Path, order: Order, ordered: bool) -> None:
    output = tmp_path / "out.jsonl"
    answerer = FakeAnswerer(turns=lambda line: line.number * 31 % 17)
    summary = run(source, output, answerer, order=order, ordered=ordered)
    assert summary.is_complete
    assert (summary.answered, summary.failed, summary.cached_tokens) == (60, 0, 60)
    assert answerer.most_at_once == 4
    found = read(output)
    assert sorted(one["custom_id"] for one in found) == sorted(f"q-{n}" for n in range(60))
    if ordered:
        assert [one["custom_id"] for one in found] == [f"q-{n}" for n in range(60)]
    assert set(found[0]) == {"id", "custom_id", "response", "error"}
    assert set(found[0]["response"]) == {"status_code", "request_id", "body"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.run.json"]


def test_a_run_that_is_complete_asks_nothing_again(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "out.jsonl"
    run(source, output)
    kept = output.read_bytes()
    answerer = FakeAnswerer()
    summary = run(source, output, answerer)
    assert (summary.answered, summary.answered_before, answerer.asked) == (60, 60, [])
    assert output.read_bytes() == kept


@pytest.mark.parametrize("ordered", [False, True])
def test_a_torn_tail_is_cut_and_answered_again(tmp_path: Path, source: Path, ordered: bool) -> None:
    output = tmp_path / "out.jsonl"
    run(source, output, ordered=ordered)
    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) // 2])
    answerer = FakeAnswerer(turns=lambda line: line.number * 31 % 17)
    assert run(source, output, answerer, ordered=ordered).is_complete
    assert len(answerer.asked) == 60 - whole[: len(whole) // 2].count(b"\n")
    assert sorted(output.read_bytes().splitlines()) == sorted(whole.splitlines())
    if ordered:
        assert output.read_bytes() == whole


def test_a_bad_line_is_a_failure_and_the_rest_is_answered(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl", chat("a", "x"), {**chat("b", "x"), "url": "/v1/files"}, chat("c", "x")
    )
    summary = run(source, tmp_path / "out.jsonl")
    assert (summary.answered, summary.failed) == (2, 1)
    (failure,) = read(tmp_path / "out.jsonl.errors.jsonl")
    assert (failure["custom_id"], failure["response"]) == ("b", None)
    assert failure["error"]["message"].startswith("line 2: has the url '/v1/files'; expected /v1/chat")


def test_the_input_is_planned_without_being_held(source: Path, tmp_path: Path) -> None:
    with opened(source, tmp_path / "out.jsonl") as (plan, _):
        assert (plan.counts.lines, plan.counts.bad, plan.counts.bare) == (60, 0, 0)
        assert [line.number for line in plan.pending(in_blocks=False)] == list(range(1, 61))


def test_an_interrupt_leaves_what_was_answered(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "out.jsonl"
    told: list[Summary] = []

    async def interrupt() -> None:
        with opened(source, output) as (plan, journal):
            answerer = FakeAnswerer(turns=lambda line: 10**6 if line.number > 20 else 0)
            running = asyncio.create_task(run_batch(plan, journal, answerer, LIMITS, told.append))
            while not told or told[-1].answered < 20:
                await asyncio.sleep(0)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(interrupt())
    assert told[-1].answered == 20
    assert sorted(one["custom_id"] for one in read(output)) == sorted(f"q-{n}" for n in range(20))
    answerer = FakeAnswerer()
    assert run(source, output, answerer).is_complete
    assert len(answerer.asked) == 40


def test_a_bug_of_the_answerer_is_not_hidden(tmp_path: Path, source: Path) -> None:
    class Broken(FakeAnswerer):
        async def answer(self, line: BatchLine) -> LineAnswer:
            if line.number == 30:
                raise ZeroDivisionError
            return await super().answer(line)

    with pytest.raises(ZeroDivisionError):
        run(source, tmp_path / "out.jsonl", Broken())
    assert run(source, tmp_path / "out.jsonl").is_complete


@pytest.mark.parametrize(("most", "at_once"), [(None, 10), (100, 3), (1, 1)])
def test_tokens_bound_what_is_in_flight(tmp_path: Path, most: int | None, at_once: int) -> None:
    lines = (chat(f"q-{n}", "x", max_tokens=10) for n in range(10, 50))  # 30 tokens each, by estimate
    answerer = FakeAnswerer(turns=lambda _: 3)
    limits = Limits(lines_in_flight=10, tokens_in_flight=most)
    run(write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl", answerer, limits=limits)
    assert answerer.most_at_once == at_once


def test_what_waits_for_a_slow_line_is_bounded(tmp_path: Path) -> None:
    class FirstIsSlow(FakeAnswerer):
        begun = 0
        begun_when_first_ended = 0

        async def answer(self, line: BatchLine) -> LineAnswer:
            self.begun += 1
            answer = await super().answer(line)
            if line.number == 1:
                self.begun_when_first_ended = self.begun
            return answer

    source = write(tmp_path / "in.jsonl", *({"prompt": str(n)} for n in range(2500)))
    answerer = FirstIsSlow(turns=lambda line: 30_000 if line.number == 1 else 0)
    assert run(source, tmp_path / "out.jsonl", answerer, ordered=True).is_complete
    assert answerer.begun_when_first_ended <= 2 * ORDERED_BLOCK


@pytest.mark.parametrize("order", Order)
def test_orders_are_followed(tmp_path: Path, order: Order) -> None:
    lines = [chat(str(n), "abc"[n % 3] * 100 + str(n), max_tokens=100 + n * 7 % 10) for n in range(9)]
    answerer = FakeAnswerer()
    source = write(tmp_path / "in.jsonl", *lines)
    run(source, tmp_path / "out.jsonl", answerer, order=order, limits=Limits(lines_in_flight=1))
    asked = [int(custom_id) for custom_id in answerer.asked]
    if order is Order.GIVEN:
        assert asked == list(range(9))
    elif order is Order.LONGEST:
        assert [n * 7 % 10 for n in asked] == sorted((n * 7 % 10 for n in range(9)), reverse=True)
    else:
        assert [sorted(asked[at : at + 3]) for at in (0, 3, 6)] == [asked[at : at + 3] for at in (0, 3, 6)]
        assert sorted(n % 3 for n in asked[::3]) == [0, 1, 2]
        assert all(len({n % 3 for n in asked[at : at + 3]}) == 1 for at in (0, 3, 6))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "the answer, 200, is no JSON: ''"),
        (b"oops\n", "the answer, 200, is no JSON: 'oops\\n'"),
        (b"\xff", "the answer, 200, is no JSON: '\\\\xff'"),
    ],
)
def test_an_answer_that_is_no_json_is_a_failure(tmp_path: Path, body: bytes, reason: str) -> None:
    class Odd(FakeAnswerer):
        async def answer(self, line: BatchLine) -> LineAnswer:
            return LineAnswer(200, "req", body)

    run(write(tmp_path / "in.jsonl", {"prompt": "x"}), tmp_path / "out.jsonl", Odd())
    (failure,) = read(tmp_path / "out.jsonl.errors.jsonl")
    assert failure["error"] == {"code": "invalid_answer", "message": f"line 1: {reason}"}


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_an_answer_of_many_lines_becomes_one(tmp_path: Path, end: bytes) -> None:
    class Pretty(FakeAnswerer):
        async def answer(self, line: BatchLine) -> LineAnswer:
            return LineAnswer(200, "req", end.join([b"{", b'  "a": [1,', b"2]", b"}", b""]))

    run(write(tmp_path / "in.jsonl", {"prompt": "x"}), tmp_path / "out.jsonl", Pretty())
    (answer,) = read(tmp_path / "out.jsonl")
    assert answer["response"]["body"] == {"a": [1, 2]}


def test_the_summary_tells_rate_and_time_left(tmp_path: Path, source: Path) -> None:
    told: list[Summary] = []
    answerer = FakeAnswerer({"q-9": [LineAnswer(503, "req", b"{}", 2.0)]})
    last = run(source, tmp_path / "out.jsonl", answerer, clock=FakeClock(), tell=told.append)
    assert told[-1] == last
    assert (last.lines_per_s, last.seconds_left, last.tokens_done) == (30, 0, last.tokens_planned)
    begun = Summary(lines=10, answered=4, answered_before=4, tokens_planned=100)
    assert (begun.lines_per_s, begun.seconds_left) == (None, None)
    going = begun.with_line(is_failure=False, usage=Usage(5, 3, 2), tokens=20, seconds=4.0)
    going = going.with_line(is_failure=True, usage=Usage(), tokens=20, seconds=8.0)
    assert (going.answered, going.failed, going.cached_tokens) == (5, 1, 2)
    assert (going.lines_per_s, going.seconds_left) == (0.25, 12.0)


def test_ids_depend_on_the_run_and_the_line_alone(tmp_path: Path, source: Path) -> None:
    for name, fingerprint, ordered in [("a", "m", False), ("b", "m", True), ("c", "other", False)]:
        run(source, tmp_path / name, fingerprint=fingerprint, ordered=ordered)
    ids = {name: {one["custom_id"]: one["id"] for one in read(tmp_path / name)} for name in "abc"}
    assert ids["a"] == ids["b"]
    assert len(set(ids["a"].values()) | set(ids["c"].values())) == 120


@pytest.mark.parametrize("most", [0, 500, 3000])
def test_answers_too_big_to_wait_are_put_in_order_at_the_end(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    failing = {"q-3": 400, "q-4": 404, "q-40": 500}
    run(source, tmp_path / "a.jsonl", FakeAnswerer(statuses=failing), ordered=True, clock=FakeClock())
    monkeypatch.setattr(batch_run, "_EARLY_BYTES", most)
    slow_first = FakeAnswerer(turns=lambda line: 200 if line.number % 20 == 1 else 0, statuses=failing)
    run(source, tmp_path / "b.jsonl", slow_first, ordered=True, clock=FakeClock())
    for name in (".jsonl", ".jsonl.errors.jsonl"):
        assert (tmp_path / f"b{name}").read_bytes() == (tmp_path / f"a{name}").read_bytes()
