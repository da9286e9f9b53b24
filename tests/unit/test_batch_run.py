"""A batch answers each line exactly once, whatever order it works in and whatever it is refused meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llorch_serve.batch.plan import Order
from support.fakes.batch import FakeAnswerer, opened, run


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
