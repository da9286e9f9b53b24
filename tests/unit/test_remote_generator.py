"""A generator in this process whose model is a worker's: the same answers, whatever becomes of the worker."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from llorch_serve.client.asynchronous import AsyncWorkerClient
from llorch_serve.client.generator import RemoteGenerator
from llorch_serve.client.patience import MOST_DEPARTURES, Patience
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import (
    AuthenticationError,
    FieldViolation,
    InvalidRequestError,
    LlorchError,
    ModelMismatchError,
    QueueFullError,
    ReplicaLostError,
    ResourceError,
    UnavailableError,
    UnreachableError,
    UnsupportedError,
    duplicate_id,
)
from llorch_serve.requests import (
    AnswerOptions,
    GenerationRequest,
    GenerationUpdate,
    RankRequest,
    ScoreRequest,
    TextPrompt,
)
from llorch_serve.sampling.params import SamplingParams
from support.fakes.generator import INFO, PATIENCE_S, FakeGenerator
from support.harness.rpc import running_server

REQUEST = GenerationRequest("a", TextPrompt("one"), SamplingParams(max_tokens=3), client_id="batch")


class Sink:
    """Takes updates; what asks waits for them."""

    def __init__(self) -> None:
        self._updates: asyncio.Queue[GenerationUpdate] = asyncio.Queue()

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        for update in updates:
            self._updates.put_nowait(update)

    async def end(self) -> list[GenerationUpdate]:
        """Return all updates up to the last."""
        found: list[GenerationUpdate] = []
        async with asyncio.timeout(PATIENCE_S):
            while not found or not found[-1].is_last:
                found.append(await self._updates.get())
        return found


def with_remote(
    address: str, use: Callable[[RemoteGenerator, Patience], Awaitable[Any]], *, seconds: float = PATIENCE_S
) -> tuple[Any, list[str]]:
    """Run ``use`` with a generator over the worker at ``address``; return its result, and what was told."""
    told: list[str] = []

    async def run() -> Any:
        async with AsyncWorkerClient(address) as client:
            info = await client.model_info()
            patience = Patience(client, info.fingerprint, seconds, told.append)
            remote = RemoteGenerator(client, info, patience)
            try:
                return await use(remote, patience)
            finally:
                await remote.close()

    return asyncio.run(run()), told


def test_answers_come_whole_and_name_the_model_that_must_give_them():
    async def use(remote: RemoteGenerator, _: Patience) -> Any:
        sink = Sink()
        remote.submit(replace(REQUEST, answers=AnswerOptions(2)), sink)
        return await sink.end()

    generator = FakeGenerator()
    with running_server(generator) as server:
        found, told = with_remote(server.address, use)
    # The fake makes one answer of each request.
    (answer,) = found
    assert (answer.request_id, answer.text, answer.token_ids) == ("a", "w0 w1 w2 ", (0, 1, 2))
    assert answer.completion is not None
    assert told == []
    (asked,) = generator.submitted
    assert (asked.fingerprint, asked.client_id) == (INFO.fingerprint, "batch")


def test_what_needs_no_engine_blocks_another_thread():
    async def use(remote: RemoteGenerator, _: Patience) -> Any:
        tokens = await asyncio.to_thread(remote.tokenize, TextPrompt("ab"))
        text = await asyncio.to_thread(remote.detokenize, (97,), keep_special_tokens=False)
        load = await asyncio.to_thread(remote.load)
        assert remote.model_info() == replace(INFO)
        assert remote.violations(TextPrompt(""), SamplingParams(), AnswerOptions()) == []
        with pytest.raises(UnsupportedError, match="/v1/rerank"):
            remote.submit_rank(RankRequest("r", "q", ("d",)), Sink())
        return tokens, text, load.slots

    with running_server(FakeGenerator()) as server:
        found, _ = with_remote(server.address, use)
    assert found[0] == ((97, 98), "ab")
    assert found[2] == 8


def test_scores_come_in_their_order():
    async def use(remote: RemoteGenerator, _: Patience) -> Any:
        sink = Sink()
        texts = (TextPrompt("ab"), TextPrompt("c"))
        remote.submit_score(ScoreRequest("s", TextPrompt("q"), texts), sink)
        return await sink.end()

    with running_server(FakeGenerator()) as server:
        found, _ = with_remote(server.address, use)
    assert [(each.index, each.open_answers) for each in found] == [(0, 1), (1, 0)]
    assert [each.score.logprob for each in found] == [-2, -1]
    assert all(each.completion.prompt_tokens == 1 for each in found)


def test_a_request_that_is_aborted_ends_here_and_there():
    async def use(remote: RemoteGenerator, _: Patience) -> Any:
        sink, early = Sink(), Sink()
        abort = remote.submit(REQUEST, sink)
        await asyncio.to_thread(generator.wait_for, lambda it: it.live_ids)
        abort()
        abort()
        remote.submit(replace(REQUEST, request_id="b"), early)()  # before it has been sent
        found = [*await sink.end(), *await early.end()]
        await asyncio.to_thread(generator.wait_for, lambda it: not it.live_ids)
        abort()
        return found

    generator = FakeGenerator(free_running=False)
    with running_server(generator) as server:
        found, _ = with_remote(server.address, use)
    assert [each.request_id for each in found] == ["a", "b"]
    assert {each.completion.reason for each in found} == {FinishReason.CANCELLED}


class Flaky:
    """Plays a client whose calls end as a test says, one after the other; then they are answered."""

    address = "here:1"

    def __init__(self, *ends: Exception) -> None:
        self.ends: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        for end in ends:
            self.ends.put(end)
        self.sent = self.waited = 0
        self.fingerprint = INFO.fingerprint
        self.ready: Exception | None = None

    async def send(self) -> str:
        self.sent += 1
        if not self.ends.empty():
            raise self.ends.get()
        return "answer"

    async def wait_until_ready(self, timeout_s: float) -> None:
        self.waited += 1
        if self.ready is not None:
            raise self.ready

    async def model_info(self) -> Any:
        return replace(INFO, fingerprint=self.fingerprint)


def patiently(client: Any, seconds: float = PATIENCE_S) -> tuple[Any, Patience, list[str]]:
    """Send one call; return what became of it."""
    told: list[str] = []
    patience = Patience(client, INFO.fingerprint, seconds, told.append)

    async def run() -> Any:
        try:
            return await patience.answer(client.send)
        except LlorchError as error:
            return error

    return asyncio.run(run()), patience, told


AWAY = UnreachableError("no worker answers at here:1")


@pytest.mark.parametrize("end", [AWAY, UnavailableError("the worker is shutting down")])
def test_a_worker_that_goes_away_is_waited_for_and_asked_again(end):
    client = Flaky(end, end)
    found, patience, told = patiently(client)
    assert (found, client.sent, patience.lost) == ("answer", 3, None)
    assert len(told) == 2
    assert str(end) in told[0]
    assert told[1] == "the worker at here:1 answers again"


def test_a_worker_that_does_not_come_back_in_time_is_lost_for_all():
    client = Flaky(AWAY)
    client.ready = AWAY
    found, patience, _ = patiently(client, seconds=0.2)
    assert isinstance(found, UnreachableError)
    assert "waited for for 0.2 s" in str(found)
    assert patience.lost is found


def test_a_worker_that_comes_back_with_another_model_is_lost():
    client = Flaky(AWAY)
    client.fingerprint = "e" * 64
    found, patience, _ = patiently(client)
    assert isinstance(found, ModelMismatchError)
    assert "ffffffffffff" in str(found)
    assert "eeeeeeeeeeee" in str(found)
    assert patience.lost is found


@pytest.mark.parametrize("end", [AuthenticationError("no token"), ModelMismatchError("another")])
def test_what_no_waiting_mends_is_lost_at_once(end):
    found, patience, told = patiently(Flaky(end))
    assert found is patience.lost is end
    assert told == []


@pytest.mark.parametrize(
    "end",
    [
        ReplicaLostError("gone"),
        QueueFullError("full", retry_after_s=1),
        InvalidRequestError([FieldViolation("sampling.top_p", "bad")]),
    ],
)
def test_what_ends_one_request_ends_that_alone(end):
    found, patience, _ = patiently(Flaky(end))
    assert found is end
    assert patience.lost is None


def test_an_id_that_the_worker_has_not_let_go_of_is_sent_again():
    client = Flaky(duplicate_id("a"), duplicate_id("a"))
    assert patiently(client)[0] == "answer"
    assert client.waited == 0


def test_want_of_memory_is_a_full_queue():
    found, _, _ = patiently(Flaky(ResourceError("the worker's memory is full")))
    assert isinstance(found, QueueFullError)
    assert found.retry_after_s == 1


def test_a_request_that_ends_the_worker_each_time_fails_in_the_end():
    client = Flaky(*[AWAY] * (MOST_DEPARTURES + 1))
    found, patience, _ = patiently(client)
    assert found is AWAY
    assert patience.lost is None
