"""Lines of a batch are read one by one: what can be told apart is run, what cannot stops the whole file."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llorch_serve.batch.lines import (
    MAX_ASKED_BYTES,
    BadLineError,
    BatchLine,
    LineForm,
    UnreadableLineError,
)
from llorch_serve.batch.plan import BatchInputError
from llorch_serve.batch.prefixes import look
from support.fakes.batch import FakeAnswerer, run

PUBLISHED = Path(__file__).parent.parent / "data" / "published" / "batch_lines.jsonl"
CASES = [json.loads(line) for line in PUBLISHED.read_text(encoding="utf-8").splitlines()]
INPUTS = [one for one in CASES if one["kind"] == "input"]
OUTPUTS = [one for one in CASES if one["kind"] != "input"]


def line(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def openai(**fields: object) -> bytes:
    return line(**{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}, **fields})


@pytest.mark.parametrize("case", INPUTS, ids=lambda one: one["from"])
def test_published_files_are_run_or_refused(tmp_path: Path, case: dict[str, Any]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(case["lines"]), encoding="utf-8")
    expected = case["expected"]
    if "refused" in expected:
        with pytest.raises(BatchInputError) as refused:
            run(source, tmp_path / "out.jsonl")
        assert str(refused.value).startswith(expected["refused"])
        assert list(tmp_path.iterdir()) == [source]
        return
    summary = run(source, tmp_path / "out.jsonl")
    assert {"answered": summary.answered, "failed": summary.failed} == expected


@pytest.mark.parametrize("case", OUTPUTS, ids=lambda one: one["from"])
def test_answers_have_the_fields_of_published_ones(tmp_path: Path, case: dict[str, Any]) -> None:
    (published,) = (json.loads(one) for one in case["lines"])
    source = tmp_path / "in.jsonl"
    source.write_bytes(openai())
    status = published["response"]["status_code"]
    run(source, tmp_path / "out.jsonl", FakeAnswerer(statuses={"a": status}))
    name = "out.jsonl.errors.jsonl" if case["kind"] == "errors" else "out.jsonl"
    (found,) = (json.loads(one) for one in (tmp_path / name).read_text().splitlines())
    assert list(found) == list(published)
    assert list(found["response"]) == list(published["response"])
    assert found["response"]["status_code"] == status
    assert found["id"].startswith("batch_req_")
    assert found["error"] is None


def test_a_body_goes_on_as_it_came() -> None:
    body = '{"model": "m",  "prompt":"\\u00e9é", "seed": 1e0}'
    raw = f'{{"body": {body} , "custom_id": "x", "url": "/v1/completions"}}'.encode()
    assert LineForm().read(3, raw) == BatchLine(3, "x", "/v1/completions", body.encode())


@pytest.mark.parametrize(
    ("asked", "url"),
    [({"prompt": "x"}, "/v1/completions"), ({"messages": []}, "/v1/chat/completions")],
)
def test_a_bare_line_takes_settings_where_it_has_none_of_its_own(asked: dict[str, object], url: str) -> None:
    form = LineForm(settings={"max_tokens": 7, "seed": 1})
    found = form.read(5, line(**asked, max_tokens=9))
    assert (found.custom_id, found.url, found.is_bare) == ("line-5", url, True)
    assert json.loads(found.body) == {**asked, "max_tokens": 9, "seed": 1}
    assert form.read(5, line(custom_id="mine", **asked)).custom_id == "mine"


def test_settings_do_not_reach_a_line_that_has_a_body() -> None:
    found = LineForm(settings={"seed": 1}).read(1, openai(body={"prompt": "x"}))
    assert (found.body, found.is_bare) == (b'{"prompt": "x"}', False)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (openai(url="/v1/files"), "has the url '/v1/files'; expected /v1/chat/completions or /v1/compl"),
        (openai(url="https://api.openai.com/v1/completions"), "has the url 'https://api"),
        (openai(url=["/v1/completions"]), "has the url "),
        (line(custom_id="a", method="POST", body={"text": "x"}), "has the url 'None'; expected"),
        (openai(method="GET"), "has the method 'GET'; expected POST"),
        (openai(method=None), "has the method 'None'; expected POST"),
        (openai(body=None), "has the body 'null'; expected an object"),
        (openai(body="x"), "has the body '\"x\"'; expected an object"),
        (openai(body=[1]), "has the body '[1]'; expected an object"),
        (line(custom_id="a", url="/v1/completions"), "has the body ''; expected an object"),
        (openai(body={"temperature": float("nan")}), "holds NaN, Infinity or half a surrogate pair"),
        (openai(body={"prompt": "\ud800"}), "holds NaN, Infinity or half a surrogate pair, which JSON"),
        (openai(priority=1), "has 'priority' beside custom_id, method, url and body; leave it out"),
        (line(custom_id="a", prompt="x", messages=[]), "has a prompt and messages; expected one of them"),
        (line(custom_id="a", prompt="x", method="PUT"), "has the method 'PUT'"),
    ],
)
def test_a_line_that_cannot_be_answered_keeps_its_id(raw: bytes, reason: str) -> None:
    with pytest.raises(BadLineError) as found:
        LineForm().read(1, raw)
    assert found.value.custom_id == "a"
    assert str(found.value).startswith(reason)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"custom_id": "a"', "is no object in JSON (Input data was truncated)"),
        (b"[]", "is no object in JSON"),
        (b'{"custom_id": "a", "body": {"x": 01}}', "is no object in JSON (invalid number"),
        (b'{"custom_id": "a", "body": {"x": "\xff"}}', "is not UTF-8 at byte 34; write the file as UTF-8"),
        (b'{"a":' * 100_000, "is nested too deeply"),
        (openai(custom_id=7), "has the custom_id '7'; expected a text"),
        (openai(custom_id=None), "has the custom_id 'null'; expected a text"),
        (openai(custom_id=""), "has a custom_id of 0 characters; expected 1 to 512"),
        (openai(custom_id="x" * 513), "has a custom_id of 513 characters"),
        (rb'{"custom_id": "\ud800", "prompt": "x"}', "is no object in JSON (unexpected end of hex escape"),
        (b'{"custom_id": ["a"], "body": {"x": NaN}}', "is no object in JSON (invalid character"),
        (
            line(method="POST", url="/v1/completions", body={}),
            "has no custom_id; a line has custom_id, method",
        ),
        (line(text="x"), "has no custom_id"),
    ],
)
def test_a_line_without_an_id_stops_the_file(raw: bytes, reason: str) -> None:
    with pytest.raises(UnreadableLineError) as found:
        LineForm().read(1, raw)
    assert str(found.value).startswith(reason)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_whatever_a_line_is_it_is_read_or_refused(raw: bytes) -> None:
    for whole in (raw, b'{"custom_id": "a", "body": ' + raw + b"}", b'{"custom_id":' + raw + b"}"):
        try:
            found = LineForm().read(1, whole)
        except (BadLineError, UnreadableLineError) as error:
            str(error).encode()
        else:
            found.custom_id.encode()
            assert isinstance(json.loads(found.body), dict)


BOMBS = {
    "a field that is looked at": (
        b'{"custom_id": "a", "url": "/v1/completions", "body": {"stream": [',
        b"{},",
        b"{}]}}",
    ),
    "a body": (b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": [', b"{},", b"{}]}}"),
    "a faulty line": (b'{"custom_id": "a", "body": {"x": NaN, "prompt": [', b"{},", b"{}]}}"),
    "a bare line": (b'{"prompt": [', b"{},", b"{}]}"),
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("size", [2**20, 2**24 - 100], ids=["asked", "long"])
def test_a_line_is_planned_in_little_more_memory_than_it_has(bomb: str, size: int) -> None:
    begin, unit, end = BOMBS[bomb]
    raw = begin + unit * ((size - len(begin) - len(end)) // len(unit)) + end
    tracemalloc.start()
    try:
        with contextlib.suppress(BadLineError, UnreadableLineError):
            look(LineForm().read(1, raw).body)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < (3 * size if bomb != "a faulty line" else 2**25)


def test_a_line_that_no_route_takes_fails_alone_though_it_could_be_read() -> None:
    long = "x" * MAX_ASKED_BYTES
    for raw in (openai(body={"prompt": long}), line(custom_id="a", prompt=long)):
        with pytest.raises(BadLineError, match=r"has \d+ bytes; expected at most \d+") as found:
            LineForm().read(1, raw)
        assert found.value.custom_id == "a"
    with pytest.raises(BadLineError) as bare:
        LineForm().read(7, line(prompt=long))
    assert bare.value.custom_id == "line-7"
    with pytest.raises(UnreadableLineError, match="no custom_id"):
        LineForm().read(7, line(url="/v1/completions", body={"prompt": long}))
