"""What the APIs that are translated to chats share: names of fields, parts by their type, segments."""

from __future__ import annotations

import msgspec
import pytest

from llorch_serve.calls.callers import Caller
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.http.fields import MAX_COUNTED, MAX_LISTED
from llorch_serve.http.messages.routes import counting
from llorch_serve.http.responses.kept import KeptResponses
from llorch_serve.http.responses.routes import ResponseRoutes
from llorch_serve.http.responses.schema import TEXT_PARTS
from llorch_serve.http.translated.blocks import Findings, read_block
from llorch_serve.http.translated.planning import FieldNames
from llorch_serve.http.translated.segments import SegmentKind, Segments, Stage
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.requests import GenerationUpdate, ToolCallDelta
from llorch_serve.sampling.logprobs import TokenLogprob, TokenLogprobs
from support.fakes.generator import INFO

NAMES = FieldNames(
    ("system", "input[0].content[1]"),
    (("stop_token_ids", "stop_token_ids"), ("stop", "ends")),
    "input_schema",
)


@pytest.mark.parametrize(
    ("field", "own"),
    [
        ("messages[0].content", "system"),
        ("messages[1]", "input[0].content[1]"),
        ("messages[2].role", "messages[2].role"),
        ("stop[0]", "ends[0]"),
        ("stop_token_ids[1]", "stop_token_ids[1]"),
        ("tools[3].function.parameters.properties.a", "tools[3].input_schema.properties.a"),
        ("tools[3].function.name", "tools[3].name"),
        ("temperature", "temperature"),
    ],
)
def test_fields_of_a_chat_have_the_names_of_the_api(field, own):
    assert NAMES.own(field) == own


class Text(msgspec.Struct):
    text: str
    type: str | None = None


KINDS = {"text": Text}


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b'{"type": "text", "text": "a"}', None),
        (b'{"type": "text"}', "p"),
        (b'{"type": "text", "text": 1}', "p.text"),
        (b'{"type": "image"}', "p.type"),
        (b"{}", "p.type"),
        (b"[]", "p"),
        (b'{"type": 1}', "p.type"),
        (b'"a"', "p"),
        (b'{"type": "text", "text": "\xff"}', "p"),
        (b'{"type": "text", "text": "a", "colour": 1}', "p.colour"),
    ],
)
def test_a_part_is_read_or_refused_by_its_name(raw, field, lenient, optional):
    findings = Findings(unknown=[] if lenient else None)
    read = read_block(msgspec.Raw(raw), "p", KINDS, findings, optional=optional)
    refused = [violation.field for violation in findings.bad]
    assert findings.ignored == []
    if field == "p.colour" and lenient:
        assert (refused, findings.unknown, read) == ([], ["p.colour"], Text("a", "text"))
    elif (b'"image"' in raw and lenient and optional) or (raw == b"{}" and lenient and optional):
        assert (refused, findings.unknown, read) == ([], ["p"], None)
    else:
        assert (refused, findings.unknown or []) == ([] if field is None else [field], [])
        assert (read is None) == (field not in (None, "p.colour"))


def test_what_is_found_is_not_listed_without_end():
    findings = Findings(unknown=[])
    raw = msgspec.Raw(msgspec.json.encode({"type": "text", "text": "a"} | {f"c{i}": 1 for i in range(999)}))
    read_block(raw, "p", KINDS, findings)
    assert len(findings.told) == MAX_LISTED
    assert findings.told[-1] == f"and {999 - MAX_LISTED + 1} more"
    for _ in range(9):
        read_block(raw, "q", KINDS, findings)
    assert findings.unknown is not None
    assert len(findings.unknown) < 2 * MAX_COUNTED
    strict = Findings()
    read_block(raw, "p", KINDS, strict)
    assert strict.is_full


def place(text):
    return TokenLogprobs(TokenLogprob(1, -1.0, text, text.encode()), ())


def test_an_answer_is_cut_where_its_kind_changes():
    segments = Segments()
    said = [
        {"reasoning": "a"},
        {"reasoning": "b", "text": "c"},
        {"text": "d", "tool_calls": (ToolCallDelta(0, "i", "f", "{"), ToolCallDelta(0, arguments="}"))},
        {"text": "e"},
    ]
    changes = [
        change
        for one in said
        for change in segments.take(GenerationUpdate("r", **{"text": "", "token_ids": ()} | one))
    ]
    assert [(segment.kind, segment.text) for segment in segments.found] == [
        (SegmentKind.THOUGHT, "ab"),
        (SegmentKind.TEXT, "cd"),
        (SegmentKind.CALL, "{}"),
        (SegmentKind.TEXT, "e"),
    ]
    assert [change.stage for change in changes].count(Stage.CLOSED) == 3
    assert [segment.place for segment in segments.found] == [0, 1, 2, 3]


def test_logprobs_of_tokens_whose_text_comes_later_come_with_it():
    segments = Segments()
    for text, logprobs, thought in (("", "a", ""), ("", "b", "hm"), ("", "c", ""), ("cd", "d", "")):
        segments.take(GenerationUpdate("r", text, (1,), reasoning=thought, logprobs=(place(logprobs),)))
    assert [one.chosen.text for one in segments.found[-1].logprobs] == ["c", "d"]


def test_what_is_not_read_of_a_text_is_not_built():
    """Of an item that is kept and referred to it may be megabytes, which stops every thread meanwhile."""
    raw = b'{"type": "output_text", "text": "a", "annotations": [{}], "logprobs": [{}], "parsed": {}}'
    found = read_block(msgspec.Raw(raw), "p", TEXT_PARTS, Findings())
    for unread in (found.annotations, found.logprobs, found.parsed):
        assert isinstance(unread, msgspec.Raw)


class Refusing:
    """Implements what counting needs of a generator."""

    def tokenize(self, prompt):
        raise InvalidRequestError([FieldViolation("input.chat.messages[1].content", "is bad")])


RESPONSES = ResponseRoutes(KeptResponses(), UnknownFields.REFUSE)
TURNS = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]


@pytest.mark.parametrize(
    ("count", "body", "field"),
    [
        (counting(UnknownFields.REFUSE), {"messages": TURNS}, "messages[1]"),
        (RESPONSES.count, {"input": TURNS}, "input[1]"),
    ],
)
def test_what_keeps_tokens_from_being_counted_has_the_names_of_the_api(count, body, field):
    with pytest.raises(InvalidRequestError) as refused:
        count(msgspec.json.encode(body), Refusing(), INFO, Caller("", "", ""))
    assert [violation.field for violation in refused.value.violations] == [field]
