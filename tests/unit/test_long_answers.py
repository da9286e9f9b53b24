"""Answers of thousands of log-probabilities are written beside the event loop, which answers others
meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.http import openai_answers, score_routes
from llorch_serve.http.openai_logprobs import chat_logprobs
from llorch_serve.http.openai_requests import AnswerShape
from llorch_serve.http.openai_routes import chat_dialect
from llorch_serve.http.problems import Problem
from llorch_serve.http.responses import answers
from llorch_serve.http.responses.answers import ResponseAnswer
from llorch_serve.http.responses.kept import KeptResponses
from llorch_serve.http.responses.shape import ResponseShape
from llorch_serve.http.score_routes import score_dialect
from llorch_serve.http.service import AnswerPlan, Dialect
from llorch_serve.http.translated.answering import TranslatedDialect
from llorch_serve.requests import Completion, ContinuationScore, GenerationUpdate, Timings
from llorch_serve.sampling.logprobs import TokenLogprob, TokenLogprobs

END = Completion(FinishReason.STOP, None, 1, 1, 0, Timings(0, 0, 0))
TOKEN = TokenLogprob(1, -1.0, "a", b"a")
MANY = (TokenLogprobs(TOKEN, (TOKEN,) * 20),) * 300


class Call:
    """A call whose updates come one by one."""

    def __init__(self, *updates: GenerationUpdate) -> None:
        self._updates = list(updates)

    async def take(self) -> list[GenerationUpdate]:
        return [self._updates.pop(0)]


class Exchange:
    """Encodes what is sent, as the real one does."""

    progress: Any = None

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def send_json(self, body: object) -> None:
        self.sent.append(msgspec.json.decode(msgspec.json.encode(body)))

    async def send_events(self, *events: tuple[str | None, object]) -> None:
        self.sent += [msgspec.json.decode(msgspec.json.encode(data)) for _, data in events]

    async def start_events(self) -> None: ...

    async def end_events(self) -> None: ...

    async def close_events(self) -> None: ...


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[threading.Thread]]:
    """Give the threads that write many log-probabilities."""
    found: set[threading.Thread] = set()

    def noted(places: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
        if len(places) == len(MANY):
            found.add(threading.current_thread())
        return chat_logprobs(places)

    for module in (openai_answers, score_routes, answers):
        monkeypatch.setattr(module, "chat_logprobs", noted)
    yield found
    assert found, "nothing was written"
    assert threading.current_thread() not in found


def answered(dialect: Dialect, detail: object, *updates: GenerationUpdate, stream: bool) -> list[Any]:
    exchange = Exchange()
    plan = AnswerPlan(stream, str, detail)
    asyncio.run(dialect.answer(plan, [Call(*updates)], exchange))  # type: ignore[list-item,arg-type]  # as above
    return exchange.sent


@pytest.mark.parametrize("stream", [False, True])
def test_chats(stream: bool) -> None:
    shape = AnswerShape("chatcmpl-1", 0, "m", False, answers=1, logprobs=True)
    update = GenerationUpdate("r", "a" * 300, (1,) * 300, END, logprobs=MANY)
    sent = answered(chat_dialect(), shape, update, stream=stream)
    assert len(sent[-1]["choices"][0]["logprobs"]["content"]) == len(MANY)


def test_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[object] = []
    send_json = Exchange.send_json

    async def noted(exchange: Exchange, body: object) -> None:
        bodies.append(body)
        await send_json(exchange, body)

    monkeypatch.setattr(Exchange, "send_json", noted)
    shape = score_routes._Shape("score-1", "m", True)
    score = ContinuationScore(-1.0, False, 300, 1, 0, MANY)
    (sent,) = answered(score_dialect(), shape, GenerationUpdate("r", "", (), END, score=score), stream=False)
    assert len(sent["data"][0]["logprobs"]) == len(MANY)
    assert [type(body) for body in bodies] == [msgspec.Raw]  # so that the loop has nothing to encode


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_items(stream: bool, at_once: bool) -> None:
    """Whatever came piece by piece is written again as a whole, at the end."""
    shape = ResponseShape("resp_1", 0, time.time, "m", {}, False, True, ())
    kept = KeptResponses()
    dialect = TranslatedDialect(pytest.fail, lambda detail: ResponseAnswer(detail, kept), Problem.openai)
    step = len(MANY) if at_once else 10
    pieces = [
        GenerationUpdate("r", "a" * step, (1,) * step, logprobs=MANY[at : at + step])
        for at in range(0, len(MANY), step)
    ]
    sent = answered(dialect, shape, *pieces, GenerationUpdate("r", "", (), END), stream=stream)
    last = sent[-1]["response"] if stream else sent[-1]
    (item,) = last["output"]
    assert item["content"][0]["text"] == "a" * 300
    assert len(item["content"][0]["logprobs"]) == len(MANY)
