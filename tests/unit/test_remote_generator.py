"""A generator in this process whose model is a worker's: the same answers, whatever becomes of the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from llorch_serve.client.asynchronous import AsyncWorkerClient
from llorch_serve.client.generator import RemoteGenerator
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import (
    AuthenticationError,
    CancelledError,
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
    WorkerError,
    duplicate_id,
)
from llorch_serve.requests import (
    AnswerOptions,
    Completion,
    GenerationRequest,
    GenerationUpdate,
    RankRequest,
    ScoreRequest,
    TextPrompt,
    Timings,
)
from llorch_serve.sampling.params import SamplingParams
from support.fakes.generator import INFO, PATIENCE_S, FakeGenerator
from support.harness.rpc import running_server

REQUEST = GenerationRequest("a", TextPrompt("one"), SamplingParams(max_tokens=3), client_id="batch")

DONE = Completion(FinishReason.LENGTH, None, 1, 2, 3, Timings(0, 0, 0))


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


def with_remote(address: str, use: Callable[[RemoteGenerator], Awaitable[Any]]) -> tuple[Any, list[str]]:
    """Run ``use`` with a generator over the worker at ``address``; return its result, and what was told."""
    told: list[str] = []

    async def run() -> Any:
        async with AsyncWorkerClient(address) as client:
            info = await client.model_info()
            remote = RemoteGenerator(client, info, told.append)
            try:
                return await use(remote)
            finally:
                await remote.close()

    return asyncio.run(run()), told


def test_answers_come_whole_and_name_the_model_that_must_give_them():
    async def use(remote: RemoteGenerator) -> Any:
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
    async def use(remote: RemoteGenerator) -> Any:
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
    async def use(remote: RemoteGenerator) -> Any:
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
    async def use(remote: RemoteGenerator) -> Any:
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
        self._ends = list(ends)

    async def complete(self, request: GenerationRequest) -> list[GenerationUpdate]:
        if self._ends:
            raise self._ends.pop(0)
        return [GenerationUpdate(request.request_id, "answer", (), DONE)]


def ended(*ends: Exception) -> tuple[list[Exception | None], LlorchError | None, list[str]]:
    """Send a request as often as calls end badly, and once more; return their errors."""
    told: list[str] = []

    async def run() -> Any:
        remote = RemoteGenerator(Flaky(*ends), INFO, told.append)  # type: ignore[arg-type]  # it plays one
        errors = []
        for _ in range(len(ends) + 1):
            sink = Sink()
            remote.submit(REQUEST, sink)
            errors.append((await sink.end())[-1].error)
        return errors, remote.lost

    errors, lost = asyncio.run(run())
    return errors, lost, told


AWAY = UnreachableError("no worker answers at here:1")


@pytest.mark.parametrize("end", [AWAY, UnavailableError("the worker is shutting down")])
def test_a_worker_that_goes_away_is_told_once_and_may_be_asked_again(end):
    errors, lost, told = ended(end, end)
    assert [type(error) for error in errors] == [UnavailableError, UnavailableError, type(None)]
    assert told == [str(end), "the worker at here:1 answers again"]
    assert lost is None


def test_a_worker_that_serves_another_model_is_lost():
    errors, lost, told = ended(ModelMismatchError("fingerprint"))
    assert errors == [lost, None]
    assert str(lost) == "the worker at here:1 serves another model by now: fingerprint"
    assert told == []


def test_a_request_that_the_worker_ends_may_be_asked_again():
    errors, lost, _ = ended(CancelledError("aborted"))
    assert type(errors[0]) is WorkerError
    assert lost is None


@pytest.mark.parametrize(
    "end",
    [
        ReplicaLostError("gone"),
        QueueFullError("full", retry_after_s=1),
        InvalidRequestError([FieldViolation("sampling.top_p", "bad")]),
        AuthenticationError("no token"),
        WorkerError("answered INTERNAL"),
    ],
)
def test_what_ends_one_request_ends_that_alone(end):
    assert ended(end) == ([end, None], None, [])


@pytest.mark.parametrize("end", [duplicate_id("a"), ResourceError("the worker's memory is full")])
def test_what_passes_by_itself_is_a_full_queue(end):
    errors, lost, _ = ended(end)
    assert isinstance(errors[0], QueueFullError)
    assert errors[0].retry_after_s == 1
    assert lost is None
