"""Reading JSON bodies field by field."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.http.fields import BODY, MAX_LISTED, read_struct
from llorch_serve.http.problems import describe


class Point(msgspec.Struct, forbid_unknown_fields=True):
    x: int


class Body(msgspec.Struct, kw_only=True):
    prompt: str
    count: int = 1
    share: float | None = None
    points: list[Point] = msgspec.field(default_factory=list)
    kept: list[msgspec.Raw] = msgspec.field(default_factory=list)


def violations(raw: bytes) -> dict[str, str]:
    with pytest.raises(InvalidRequestError) as caught:
        read_struct(raw, Body)
    return {v.field: v.description for v in caught.value.violations}


def test_values_are_read_and_null_is_absent():
    body = read_struct(b'{"prompt": "a", "count": null, "share": 1, "points": [{"x": 2}]}', Body)
    assert body == Body(prompt="a", count=1, share=1.0, points=[Point(2)])


def test_every_bad_field_is_named():
    found = violations(b'{"count": "many", "share": [], "other": 1, "points": [{"x": 1}, {"x": "a"}]}')
    assert found["prompt"].startswith("not set")
    assert "`int`" in found["count"]
    assert "share" in found
    assert found["other"].startswith("unknown field; known are prompt, count, share, points, kept")
    assert "`int`" in found["points[1].x"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b'"a"', b"{", b'{"prompt": NaN}', b'{"a": "\xff"', b"{'a': 1}", b"[" * 10_000],
)
def test_what_is_no_object_is_refused_as_a_whole(raw):
    assert list(violations(raw)) == [BODY]


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (b'"\xff"', "prompt"),
        (b"[" * 100_000 + b"]" * 100_000, BODY),
        (b"1e999", "prompt"),
        (b"true", "prompt"),
    ],
)
def test_hostile_values_are_refused_by_name(value, field):
    assert field in violations(b'{"prompt": ' + value + b"}")


def test_a_flood_of_unknown_fields_is_counted():
    found = violations(json.dumps({f"f{i}": 1 for i in range(100)} | {"prompt": "a"}).encode())
    assert len(found) == MAX_LISTED + 1
    assert found[BODY] == f"at least {100 - MAX_LISTED} more fields are bad"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_any_json_is_read_or_refused(value):
    raw = json.dumps({"prompt": value, "points": value}).encode("utf-8", "surrogatepass")
    try:
        body = read_struct(raw, Body)
    except InvalidRequestError:
        return
    assert body.prompt == value


def test_what_is_kept_as_it_came_is_text_all_the_same():
    assert list(violations(b'{"prompt": "a", "kept": [{"a": "\xff"}]}')) == ["kept"]


@pytest.mark.parametrize("count", [1, MAX_LISTED, MAX_LISTED + 1, 100_000])
def test_a_refusal_lists_so_many_fields_whoever_has_found_them(count):
    error = InvalidRequestError([FieldViolation(f"tools[{i}]", "is no object") for i in range(count)])
    told = describe(error, route="/v1/chat/completions").openai()["error"]
    assert told["param"] == "tools[0]"
    assert len(told["errors"]) == min(count, MAX_LISTED + 1)
    last = told["errors"][-1]
    if count > MAX_LISTED + 1:
        left = count - MAX_LISTED
        assert last == {"field": "body", "message": f"at least {left} more fields are bad"}
    else:
        assert last["field"] == f"tools[{count - 1}]"
