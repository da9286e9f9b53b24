"""What a JSON body may hold is counted before it is decoded: strings and escapes are no values, wherever the
body is cut.
"""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llorch_serve.errors import InvalidRequestError
from llorch_serve.http import fields, values
from llorch_serve.http.openai_schema import ChatBody, CompletionBody

JSON = st.recursive(
    st.none() | st.integers(0, 9) | st.text('ab,[{"\\]}\n', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(',["\\', max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def counts(value: object) -> tuple[int, int]:
    """Commas between values, and objects and lists, by walking the decoded value."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [counts(item) for item in (value.values() if isinstance(value, dict) else value)]
    return max(len(value) - 1, 0) + sum(a for a, _ in inner), 1 + sum(b for _, b in inner)


@given(JSON, st.integers(1, 9))
def test_values_are_counted_as_they_are(value: object, piece: int) -> None:
    raw = json.dumps(value, ensure_ascii=False).encode()
    commas, openings = counts(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "_SMALL_BYTES", 0)
        patch.setattr(values, "_PIECE", piece)
        for name, exact in (("MAX_COMMAS", commas), ("MAX_OPENINGS", openings)):
            with pytest.MonkeyPatch.context() as limit:
                limit.setattr(values, name, exact)
                values.check_values(raw, "body")
                if exact:
                    limit.setattr(values, name, exact - 1)
                    with pytest.raises(InvalidRequestError):
                        values.check_values(raw, "body")


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [' + b"[]," * 10**6 + b"[]]}",
        b'{"messages": [' + b'{"role": "a"},' * 10**5 + b"{}]}",
        b'{"tools": [' + b"1," * 10**6 + b"1]}",
        b'{"prompt": [' + b"1," * 10**6 + b"1]}",
        b'{"metadata": ' + b'{"a":' * 10**5 + b"1" + b"}" * 10**5 + b"}",
    ],
    ids=["lists", "messages", "tools", "ids", "depth"],
)
def test_a_flood_of_values_is_refused_before_it_is_decoded(monkeypatch, body: bytes) -> None:
    monkeypatch.setattr(msgspec.json, "decode", lambda *_, **__: pytest.fail("it was decoded"))
    with pytest.raises(InvalidRequestError, match="expected fewer"):
        fields.read_struct(body, ChatBody)


def test_long_texts_and_lists_of_ids_pass() -> None:
    text = '[{"a": 1},\\' * 2**17
    body = {"messages": [{"role": "user", "content": text}]}
    assert fields.read_struct(json.dumps(body).encode(), ChatBody).messages[0].content == text
    ids = list(range(131_072))
    assert fields.read_struct(json.dumps({"prompt": ids}).encode(), CompletionBody).prompt == ids


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([{"role": "a"}, {"role": 1}], "messages[1].role"),
        ([{"role": "a"}, 5], "messages[1]"),
        ([{"role": "a", "content": [{"type": "text"}, {"type": 2}]}], "messages[0].content[1].type"),
        ("text", "messages"),
    ],
)
def test_a_bad_message_is_named_by_its_place(messages: object, named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        fields.read_struct(json.dumps({"messages": messages}).encode(), ChatBody)
    assert named in [violation.field for violation in caught.value.violations]
