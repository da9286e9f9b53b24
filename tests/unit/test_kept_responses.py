"""Answers that are kept: whose they are, for how long, and how many."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request

from llorch_serve.http.openai_schema import CalledFunction, Message, MessageCall
from llorch_serve.http.responses import kept as module
from llorch_serve.http.responses.kept import KEPT_S, MAX_KEPT_BYTES, KeptResponses, weight
from llorch_serve.http.responses.routes import ResponseRoutes
from llorch_serve.http.unknown_fields import UnknownFields

SAID = Message("assistant", "a")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def keep(kept, name, *, owner="", size=1, document=b"{}"):
    kept.begin(name, owner, (Message("user", "a"),), size)
    kept.complete(name, SAID, document, {f"item_{name}": b"1"})


def test_an_answer_is_found_once_it_has_ended_and_by_its_owner():
    kept = KeptResponses()
    kept.begin("a", "me", (Message("user", "a"),), 1)
    assert kept.find("a", "me") is None
    assert not kept.delete("a", "me")
    kept.complete("a", SAID, b"{}", {"i": b"1"})
    found = kept.find("a", "me")
    assert [message.role for message in found.messages] == ["user", "assistant"]
    assert kept.find("a", "you") is None
    assert kept.find_item("i", "me") == b"1"
    assert kept.find_item("i", "you") is None
    assert not kept.delete("a", "you")
    assert kept.delete("a", "me")
    assert kept.find("a", "me") is kept.find_item("i", "me") is None


def test_an_answer_that_never_ends_is_let_go_of():
    kept = KeptResponses()
    kept.begin("a", "", (), 10)
    kept.abandon("a")
    kept.complete("a", SAID, b"{}", {})
    assert kept.find("a", "") is None
    keep(kept, "b")
    kept.abandon("b")
    assert kept.find("b", "") is not None


def test_an_answer_is_kept_for_an_hour():
    clock = Clock()
    kept = KeptResponses(clock)
    keep(kept, "a")
    clock.now = KEPT_S - 1
    keep(kept, "b")
    assert kept.find("a", "") is not None
    clock.now = KEPT_S
    assert kept.find("a", "") is kept.find_item("item_a", "") is None
    assert kept.find("b", "") is not None


def test_the_oldest_are_pushed_out_by_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    kept = KeptResponses()
    for name in "abc":
        keep(kept, name)
    assert [kept.find(name, "") is not None for name in "abc"] == [False, True, True]


def test_the_oldest_are_pushed_out_by_size():
    kept = KeptResponses()
    keep(kept, "a", size=MAX_KEPT_BYTES - 100)
    keep(kept, "b", document=b"1" * 200)
    assert kept.find("a", "") is None
    assert kept.find("b", "") is not None
    keep(kept, "c", size=MAX_KEPT_BYTES + 1)  # nothing that is larger than the bound is kept at all
    assert [kept.find(name, "") for name in "abc"] == [None, None, None]
    keep(kept, "d")
    assert kept.find("d", "") is not None


def test_what_has_been_pushed_out_meanwhile_is_not_kept_when_it_ends():
    kept = KeptResponses()
    kept.begin("a", "", (), 1)
    keep(kept, "b", size=MAX_KEPT_BYTES)
    kept.complete("a", SAID, b"{}", {})
    assert kept.find("a", "") is None


LONG = "a" * 10**6


@pytest.mark.parametrize(
    "message",
    [
        Message("tool", "a", tool_call_id=LONG),
        Message("user", "a", name=LONG),
        Message("assistant", None, tool_calls=[MessageCall(CalledFunction(LONG, "{}"), "a")]),
        Message("assistant", None, tool_calls=[MessageCall(CalledFunction("f", LONG), "a")]),
        Message("assistant", None, tool_calls=[MessageCall(CalledFunction("f", "{}"), LONG)]),
        Message("assistant", "a", reasoning_content=LONG),
        Message("user", "\N{GRINNING FACE}" * (10**6 // 4)),
    ],
)
def test_every_text_of_a_message_counts_with_its_bytes(message: Message):
    assert weight(message) >= 10**6


def test_a_caller_that_keeps_many_answers_pushes_out_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    kept = KeptResponses()
    keep(kept, "theirs", owner="them")
    for name in "abcd":
        keep(kept, name, owner="me")
    assert kept.find("theirs", "them") is not None
    assert [kept.find(name, "me") is not None for name in "abcd"] == [False, False, True, True]


def test_a_caller_that_keeps_large_answers_pushes_out_its_own():
    kept = KeptResponses()
    keep(kept, "theirs", owner="them", size=1000)
    for name in "ab":
        keep(kept, name, owner="me", size=MAX_KEPT_BYTES - 10_000)
    assert kept.find("theirs", "them") is not None
    assert [kept.find(name, "me") is not None for name in "ab"] == [False, True]


def test_a_long_answer_is_sent_in_pieces_as_the_client_reads():
    """Whatever is sent at once is copied for each connection that does not read, however many there are."""
    document = b"[" + b"1," * 2**19 + b"1]"
    kept = KeptResponses()
    keep(kept, "resp_1", document=document)
    sent: list[dict[str, object]] = []

    async def scenario() -> None:
        async def receive():
            await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "GET", "headers": [], "query_string": b"", "path": "/"}
        scope["path_params"] = {"response_id": "resp_1"}
        response = await ResponseRoutes(kept, UnknownFields.REFUSE).one(Request(scope))
        await response(scope, receive, send)

    asyncio.run(scenario())
    head, *pieces = sent
    assert dict(head["headers"])[b"content-length"] == str(len(document)).encode()
    assert dict(head["headers"])[b"content-type"] == b"application/json"
    assert b"".join(piece["body"] for piece in pieces) == document
    assert max(len(piece["body"]) for piece in pieces) <= 2**16
