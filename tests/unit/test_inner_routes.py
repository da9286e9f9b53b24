"""The HTTP front's routes without a socket: what answers a batch's lines, in the same bytes each time."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from llorch_serve.batch.answering import BatchStoppedError, LineAnswer, Usage
from llorch_serve.batch.lines import BatchLine
from llorch_serve.batch.records import derived_id
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import EngineStoppedError, LlorchError, QueueFullError, UnavailableError, WorkerError
from llorch_serve.http.inner import AskingRun, InnerAnswerer, never_stopped, routes_around
from llorch_serve.http.settled import settled
from llorch_serve.requests import Completion, Timings
from support.fakes.generator import FakeGenerator

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "n": 1},
    COMPLETIONS: {"prompt": ["Hi", "Ho"], "max_tokens": 2},
    RESPONSES: {"input": "Hi", "max_output_tokens": 2},
}
RUN = AskingRun("run")


class Moody(FakeGenerator):
    """A fake whose times and cached tokens are others each time."""

    _moods = itertools.count(1)

    def _complete(self, live: Any, reason: FinishReason, matched: str | None = None) -> Completion:
        mood = next(self._moods)
        made = super()._complete(live, reason, matched)
        return replace(made, timings=Timings(mood, mood, mood), cached_tokens=1, drafted_tokens=mood)


def line(url: str, body: object, custom_id: str = "a") -> BatchLine:
    return BatchLine(1, custom_id, url, json.dumps(body).encode())


def asked(
    generator: Any,
    use: Callable[[InnerAnswerer], Awaitable[Any]],
    run: AskingRun = RUN,
    stopped: Callable[[], LlorchError | None] = never_stopped,
) -> Any:
    """Use routes around a generator, and close it."""

    async def scenario() -> Any:
        async with routes_around(generator) as routes:
            return await use(InnerAnswerer(routes, run, stopped))

    try:
        return asyncio.run(scenario())
    finally:
        generator.close()


def answer(generator: Any, one: BatchLine, **how: Any) -> LineAnswer:
    found: LineAnswer = asked(generator, lambda answerer: answerer.answer(one), **how)
    return found


@pytest.mark.parametrize("url", BODIES)
def test_a_line_has_the_same_bytes_whenever_and_after_whatever_it_is_asked(url):
    async def twice(answerer: InnerAnswerer) -> Any:
        return [await answerer.answer(line(url, BODIES[url])) for _ in range(2)]

    first, second = asked(Moody(), twice)
    assert first == second
    assert first.status == 200
    document = json.loads(first.body)
    assert document["id"].partition("-" if "-" in document["id"] else "_")[2] == derived_id("", "run", "a")
    assert document.get("created", document.get("created_at")) == 0
    assert first.request_id == derived_id("req_", "run", "a")
    told, prompts = document["usage"], 2 if url == COMPLETIONS else 1
    prompt = told.get("prompt_tokens", told.get("input_tokens"))
    assert first.usage == Usage(prompt, 2 * prompts, prompts)
    assert prompt >= 2 * prompts
    for word in (b"timings", b"cached", b"prediction"):
        assert word not in first.body


def test_another_line_and_another_run_have_other_ids():
    ids = {
        json.loads(answer(FakeGenerator(), line(CHAT, BODIES[CHAT], name), run=AskingRun(run)).body)["id"]
        for name, run in (("a", "run"), ("b", "run"), ("a", "other"))
    }
    assert len(ids) == 3


def test_an_answer_of_the_responses_api_is_not_kept_and_says_so():
    document = json.loads(
        answer(Moody(), line(RESPONSES, BODIES[RESPONSES] | {"store": True, "stop": "w1"})).body
    )
    assert (document["store"], document["created_at"], document["completed_at"]) == (False, 0, 0)


def test_sampling_without_a_seed_gets_one_of_the_lines_id():
    generator = FakeGenerator()

    async def use(answerer: InnerAnswerer) -> Any:
        for name, more in (("a", {}), ("b", {}), ("c", {"seed": 7})):
            await answerer.answer(line(CHAT, BODIES[CHAT] | more, name))

    asked(generator, use)
    seeds = [request.sampling.seed for request in generator.submitted]
    wanted = [int.from_bytes(hashlib.sha256(name).digest()[:8]) >> 1 for name in (b"a", b"b")]
    assert seeds == [*wanted, 7]


def test_the_owner_and_the_client_are_those_of_the_run():
    generator = FakeGenerator()
    answer(generator, line(CHAT, BODIES[CHAT]), run=AskingRun("run", owner="token:1", client="batch:9"))
    (request,) = generator.submitted
    assert (request.owner, request.client_id) == ("token:1", "batch:9")
    assert request.correlation_id == derived_id("req_", "run", "a")


def test_the_clock_tells_the_time_where_it_is_asked_to():
    found = answer(FakeGenerator(), line(CHAT, BODIES[CHAT]), run=AskingRun("run", created=None))
    assert json.loads(found.body)["created"] > 10**9


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, RESPONSES])
def test_a_stream_is_refused_before_anything_is_generated(url):
    generator = FakeGenerator()
    found = answer(generator, line(url, BODIES[url] | {"stream": True}))
    assert found.status == 400
    assert json.loads(found.body)["error"]["param"] == "stream"
    assert generator.submitted == []


@pytest.mark.parametrize("url", ["/cancel", "/v1/inference", "/health", "/v1/messages", "/v1/batches"])
def test_what_does_more_than_answer_is_not_asked(url):
    generator = FakeGenerator()
    found = answer(generator, line(url, {"job_id": "1"}))
    assert found.status == 404
    assert "/v1/chat/completions" in json.loads(found.body)["error"]["message"]
    assert generator.submitted == []


def test_a_bad_body_is_an_answer_that_names_every_field():
    found = answer(FakeGenerator(), line(CHAT, {"messages": 3, "temperatur": 1}))
    assert found.status == 400
    fields = {each["field"] for each in json.loads(found.body)["error"]["errors"]}
    assert fields == {"messages", "temperatur"}


@pytest.mark.parametrize(
    ("error", "status", "after"),
    [
        (QueueFullError("full", retry_after_s=2.5), 429, 3),
        (UnavailableError("away"), 503, 1),
        (WorkerError("answered INTERNAL"), 502, None),
    ],
)
def test_refusals_that_pass_have_their_status_and_delay(error, status, after):
    generator = FakeGenerator()
    generator.fail_submit = error
    found = answer(generator, line(CHAT, BODIES[CHAT]))
    assert (found.status, found.retry_after_s) == (status, after)


def test_a_run_that_cannot_go_on_is_stopped():
    generator = FakeGenerator()
    generator.fail_step = EngineStoppedError("4711")
    with pytest.raises(BatchStoppedError, match="error id 4711"):
        answer(generator, line(CHAT, BODIES[CHAT]), stopped=lambda: EngineStoppedError("4711"))


def test_a_line_that_is_given_up_ends_in_the_generator():
    generator = FakeGenerator(free_running=False)

    async def use(answerer: InnerAnswerer) -> None:
        task = asyncio.create_task(answerer.answer(line(CHAT, BODIES[CHAT])))
        await asyncio.to_thread(generator.wait_for, lambda it: it.live_ids)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(generator.wait_for, lambda it: not it.live_ids)

    asked(generator, use)
    assert len(generator.aborted) == 1


def test_vectors_are_counted_and_left_as_they_are():
    body = b'{"data":[{"embedding":[0.100,1e-9]}],"usage":{"prompt_tokens":3,"total_tokens":3}}'
    assert settled(body) == (body, Usage(3, 0, 0))


def test_scores_do_not_tell_what_was_cached():
    found = answer(FakeGenerator(), line("/v1/score", {"context": "ab", "continuations": ["cd", "e"]}))
    document = json.loads(found.body)
    assert [each["logprob"] for each in document["data"]] == [-2, -1]
    assert b"cached" not in found.body
    assert found.usage.prompt_tokens == document["usage"]["prompt_tokens"] > 0


OTHERS = [b"", b"[]", b'{"usage": 3}', b'{"choices": {}}', b'{"llorch": []}', b"\xff"]


@pytest.mark.parametrize("body", OTHERS)
def test_what_is_of_another_form_stays_as_it_is(body):
    assert settled(body) == (body, Usage())
