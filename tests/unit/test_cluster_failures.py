"""A replica that fails: tried elsewhere before anything is told, lost after it, or gone on from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from llorch_serve.cluster.failures import AnswerCutError, judge
from llorch_serve.config import EngineConfig
from llorch_serve.engine.capabilities import Capabilities
from llorch_serve.errors import (
    EngineStoppedError,
    InvalidRequestError,
    LoggedError,
    QueueFullError,
    ReplicaLostError,
    UnavailableError,
)
from llorch_serve.requests import (
    ChatMessage,
    ChatPrompt,
    EmbedRequest,
    ScoreRequest,
    TextPrompt,
    whole_calls,
)
from llorch_serve.structured.spec import Regex
from llorch_serve.worker.worker import Worker
from support.builders.chat_templates import TOOLS
from support.builders.checkpoints import EOS_ID
from support.fakes.generator import FakeGenerator
from support.fakes.replicas import (
    ActorDiedError,
    BackPressureError,
    DeploymentUnavailableError,
    FakeReplicas,
    InStep,
    replicas_of,
    routed,
)
from support.harness.worker import TOKENIZER, Answer, Sink, make_session, make_worker, request, script

CHAT = ChatPrompt((ChatMessage("user", "Hello"),))


@pytest.fixture(scope="module", params=[True, False], ids=["invariant", "not invariant"])
def workers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Worker]]:
    able = Capabilities(batch_invariant=request.param)
    made = [
        make_worker(tmp_path_factory.mktemp("artifact"), make_session(context=96, capabilities=able))
        for _ in range(4)
    ]
    yield made
    for worker in made:
        worker.close()


def dying(workers: list[Worker]) -> FakeReplicas:
    """Return replicas that a test can have die after so many tokens."""
    return replicas_of(*workers, kind=InStep)


def answer(generator, asked) -> Answer:
    sink = Sink()
    generator.submit(asked, sink)
    return sink.answers(asked.request_id)[asked.request_id]


def columns(found: Answer) -> dict[int, tuple[str, list[int], list[object], list[object]]]:
    return {
        index: (
            "".join(u.text for u in found.updates if u.index == index),
            [id_ for u in found.updates if u.index == index for id_ in u.token_ids],
            [place for u in found.updates if u.index == index for place in u.logprobs],
            [place for u in found.updates if u.index == index for place in u.prompt_logprobs],
        )
        for index in {u.index for u in found.updates}
    }


def ends(found: Answer) -> list[tuple[object, ...]]:
    return sorted(
        (u.index, c.reason.value, c.stop_matched or "", c.prompt_tokens, c.generated_tokens, c.seed)
        for u in found.updates
        if (c := u.completion) is not None
    )


@pytest.mark.parametrize("lost", [1, 2])
def test_before_anything_is_told_others_are_tried(workers, lost):
    replicas = dying(workers[:3])
    replicas.parts_left = {f"r{place}": 0 for place in range(lost)}
    front = routed(*workers[:3], replicas=replicas)
    try:
        asked = request("r", TextPrompt("Hello"), max_tokens=4, temperature=1, ignore_eos=True)
        found = answer(front, asked)
        assert len(found.ids) == 4
        seed = found.completion.seed
        again = request("r", TextPrompt("Hello"), max_tokens=4, temperature=1, ignore_eos=True, seed=seed)
        assert answer(workers[3], again).ids == found.ids  # one seed, drawn once
        assert [sorted(hint.avoid) for hint in replicas.hints] == [["r0", "r1"][:n] for n in range(lost + 1)]
    finally:
        front.close()


def test_two_tries_elsewhere_are_enough(workers):
    replicas = dying(workers)
    replicas.parts_left = dict.fromkeys(("r0", "r1", "r2"), 0)
    front = routed(*workers, replicas=replicas)
    try:
        error = answer(front, request("r", TextPrompt("Hello"))).error
        assert type(error) is UnavailableError
        assert "4711" not in str(error)
        assert len(replicas.hints) == 3
    finally:
        front.close()


def test_other_requests_are_tried_elsewhere_too(workers):
    replicas = dying(workers[:2])
    replicas.parts_left = {"r0": 0}
    front, sink = routed(*workers[:2], replicas=replicas), Sink()
    try:
        front.submit_score(ScoreRequest("s", TextPrompt("Hello"), (TextPrompt(" there"),)), sink)
        assert sink.answers("s")["s"].updates[-1].score is not None
    finally:
        front.close()


def test_after_something_has_been_told_the_replica_is_lost(workers):
    replicas = dying(workers[:2])
    replicas.parts_left = {"r0": 2}
    front = routed(*workers[:2], replicas=replicas)
    try:
        found = answer(front, request("r", TextPrompt("Hello"), max_tokens=20))
        assert type(found.error) is ReplicaLostError
        assert "4711" not in str(found.error)
        assert len(found.ids) >= 2
        assert len(replicas.hints) == 1
    finally:
        front.close()


RESUMED = [
    request("text", TextPrompt("Hello there"), max_tokens=20, seed=1),
    request("drawn", (1, 2, 3), max_tokens=20, temperature=1, seed=5, logprobs=2),
    request("penalised", (1, 2, 3), max_tokens=20, temperature=1, seed=5, frequency_penalty=2.0),
    request("held back", (1, 2, 3), max_tokens=20, temperature=1, seed=5, min_tokens=20),
    request("chat", CHAT, max_tokens=20, temperature=1, seed=5),
    request("several", (4, 5), max_tokens=12, n=3, temperature=1, seed=9),
    request("echo", TextPrompt("Hello there"), max_tokens=12, echo=True, prompt_logprobs=1, seed=3),
    request("form", (4, 5), max_tokens=60, temperature=1, seed=9, structured=Regex("[a-z]{40}")),
    request("full", (4, 5), temperature=1, seed=9, ignore_eos=True),
    request("best", (4, 5), max_tokens=8, n=1, best_of=2, temperature=1, seed=9),
]


@pytest.mark.parametrize("parts", [1, 3, 7])
@pytest.mark.parametrize("asked", RESUMED, ids=lambda asked: asked.request_id)
def test_a_stream_goes_on_elsewhere_as_if_nothing_had_been(workers, asked, parts):
    replicas = dying(workers[:3])
    replicas.parts_left = {"r0": parts, "r1": 1}
    front = routed(*workers[:3], replicas=replicas, resume_streams=True)
    try:
        found, undisturbed = answer(front, asked), answer(workers[3], asked)
        assert columns(found) == columns(undisturbed)
        assert ends(found) == ends(undisturbed)
        assert len(replicas.hints) == (1 if asked.answers.best_of else 3)
    finally:
        front.close()


def test_a_stop_string_across_the_break_is_found(workers):
    plain = request("r", (1, 2, 3), max_tokens=20, temperature=1, seed=5)
    text = answer(workers[3], plain).text
    middle = len(text) // 2
    stop = text[middle - 2 : middle + 2]
    asked = request("r", (1, 2, 3), max_tokens=20, temperature=1, seed=5, stop=(stop,))
    undisturbed = answer(workers[3], asked)
    for parts in range(1, len(undisturbed.ids)):
        replicas = dying(workers[:2])
        replicas.parts_left = {"r0": parts}
        front = routed(*workers[:2], replicas=replicas, resume_streams=True)
        try:
            found = answer(front, asked)
            assert (found.text, ends(found)) == (undisturbed.text, ends(undisturbed))
        finally:
            front.close()


@pytest.mark.parametrize("exact", [True, False])
def test_a_thought_and_a_call_across_the_break_are_what_they_were(tmp_path, exact):
    config = EngineConfig(prefill_chunk=16, tool_format="hermes", reasoning_format="think")
    body = '{"name": "get_time", "arguments": {"zone": "utc"}}'
    text = f"<think>hm</think>ok <tool_call>{body}</tool_call>"
    ids = [id_ for char in text for id_ in TOKENIZER.encode(char, add_special_tokens=False)]
    chat = ChatPrompt((ChatMessage("user", "Hi"),), tools=TOOLS)
    made = []
    for name in ("a", "b"):
        session = make_session(context=512, capabilities=Capabilities(batch_invariant=exact))
        made.append(make_worker(tmp_path / name, session, config=config))
        session.rule = script(made[-1].tokenize(chat)[0], [*ids, EOS_ID])

    def told(found: Answer) -> tuple[object, ...]:
        calls = whole_calls(call for u in found.updates for call in u.tool_calls)
        thought = "".join(u.reasoning for u in found.updates)
        return found.text, thought, [(c.name, c.arguments) for c in calls], found.completion.reason

    asked = request("r", chat, max_tokens=len(ids) + 5)
    try:
        undisturbed = told(answer(made[0], asked))
        for parts in range(1, len(ids), 9):
            replicas = dying(made)
            replicas.parts_left = {"r0": parts}
            front = routed(*made, replicas=replicas, resume_streams=True)
            try:
                assert told(answer(front, asked)) == undisturbed
            finally:
                front.close()
    finally:
        for worker in made:
            worker.close()


def test_a_stream_that_is_lost_again_and_again_ends(workers):
    replicas = dying(workers)
    replicas.parts_left = {"r0": 2, "r1": 0, "r2": 0, "r3": 0}
    front = routed(*workers, replicas=replicas, resume_streams=True)
    try:
        assert type(answer(front, request("r", (1,), max_tokens=20)).error) is ReplicaLostError
        assert len(replicas.hints) == 3
    finally:
        front.close()


def test_a_dead_engine_is_a_lost_replica(workers):
    generator = FakeGenerator(free_running=False)
    front, sink = routed(generator), Sink()
    try:
        front.submit(request("r", TextPrompt("a")), sink)
        generator.step()
        sink.next()
        generator.fail_step = EngineStoppedError("4711")
        generator.step()
        assert type(sink.answers("r")["r"].error) is ReplicaLostError
    finally:
        front.close()
        generator.close()


def test_what_fails_as_it_is_aborted_is_aborted():
    generator = FakeGenerator(free_running=False)
    replicas, sink = replicas_of(generator), Sink()
    front = routed(generator, replicas=replicas)

    async def failing(kind, raw, *, hint):
        try:
            await asyncio.Event().wait()
        finally:
            raise BackPressureError("Ray's words")
        yield b""

    replicas.call = failing
    try:
        front.submit(request("r", TextPrompt("a")), sink)()
        front.submit(request("s", TextPrompt("a")), sink)
        front._loop.run(asyncio.sleep(0))
        front._loop.call_soon(front._calls.find("s").cancel)
        found = sink.answers("r", "s")
        assert {answer.completion.reason.value for answer in found.values()} == {"cancelled"}
    finally:
        front.close()
        generator.close()


def test_what_comes_after_the_last_part_of_an_answer_is_nobodys(workers):
    replicas, again = replicas_of(workers[0]), Sink()
    front = routed(workers[0], replicas=replicas)
    call, live = replicas.call, []

    async def twice(kind, raw, *, hint):
        if live:
            await asyncio.Event().wait()  # of the second request, which goes on
        async for part in call(kind, raw, hint=hint):
            yield part
        live.append(front.submit(request("r", TextPrompt("Bye"), max_tokens=1), again))
        yield part

    replicas.call = twice
    try:
        sink = Sink()
        front.submit(request("r", TextPrompt("Hello"), max_tokens=1), sink)
        assert len(sink.answers("r")["r"].updates) == 1
        front._loop.run(asyncio.sleep(0.01))
        assert front._calls.find("r") is not None
        live[0]()
        assert again.answers("r")["r"].completion.reason.value == "cancelled"
        assert sink.queue.empty()
    finally:
        front.close()


def test_a_replica_that_is_told_to_end_is_a_lost_one():
    generator = FakeGenerator(free_running=False)
    replicas, sink = replicas_of(generator), Sink()
    front = routed(generator, replicas=replicas)
    try:
        front.submit(request("r", TextPrompt("a")), sink)
        generator.step()
        sink.next()
        replicas.replicas[0].close()
        assert type(sink.answers("r")["r"].error) is ReplicaLostError
    finally:
        front.close()


def test_a_refusal_is_not_tried_elsewhere(workers):
    replicas = dying(workers[:2])
    front, sink = routed(*workers[:2], replicas=replicas), Sink()
    try:
        front.submit_embedding(EmbedRequest("e", (TextPrompt("a"),)), sink)
        sink.answers("e")
        assert len(replicas.hints) == 1
    finally:
        front.close()


def status(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, "10.0.0.7:4711: Ray's words")


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError("x"),
        AnswerCutError(),
        asyncio.CancelledError(),
        ConnectionResetError(),
        TimeoutError(),
        status(grpc.StatusCode.UNAVAILABLE),
        status(grpc.StatusCode.CANCELLED),
        status(grpc.StatusCode.INTERNAL),
        RuntimeError("Unexpected error (StatusCode.CANCELLED): CANCELLED."),
        RuntimeError("Unexpected error (StatusCode.DEADLINE_EXCEEDED): ."),
        RuntimeError("Unexpected error (StatusCode.OK): ."),
        RuntimeError("Unexpected error (None): None."),
    ],
    ids=repr,
)
def test_a_lost_replica_is_told_in_our_words(error, begun):
    failure = judge(error, begun=begun)
    assert failure.elsewhere
    assert type(failure.error) is (ReplicaLostError if begun else UnavailableError)


def test_full_replicas_say_when_to_come_back_and_absent_ones_that_they_are():
    full = judge(BackPressureError("Ray's words"), begun=False)
    assert not full.elsewhere
    assert isinstance(full.error, QueueFullError)
    assert full.error.retry_after_s > 0
    absent = judge(DeploymentUnavailableError("Ray's words"), begun=False)
    assert type(absent.error) is UnavailableError
    assert "Ray" not in f"{full.error}{absent.error}"


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (ValueError("a secret"), "a secret"),
        (status(grpc.StatusCode.UNAUTHENTICATED), "UNAUTHENTICATED"),  # of a token that is another by now
        (status(grpc.StatusCode.RESOURCE_EXHAUSTED), "Ray's words"),
        (status(grpc.StatusCode.UNKNOWN), "UNKNOWN"),
        (RuntimeError("of another kind"), "of another kind"),
        (RuntimeError("Unexpected error (StatusCode.RESOURCE_EXHAUSTED): too large."), "too large"),
        (RuntimeError("Unexpected error (StatusCode.UNKNOWN): KeyError"), "KeyError"),
        (RuntimeError("Unexpected error (StatusCode.NOT_FOUND): no method"), "no method"),
    ],
    ids=repr,
)
def test_a_bug_is_logged_and_told_by_its_id(caplog, error, logged):
    failure = judge(error, begun=False)
    assert isinstance(failure.error, LoggedError)
    assert not failure.elsewhere
    assert failure.error.error_id in caplog.text
    assert logged in caplog.text
    assert "secret" not in str(failure.error)
    assert "Ray" not in str(failure.error)


def test_our_own_refusals_stay_what_they_are():
    refusal = InvalidRequestError([])
    assert judge(refusal, begun=False).error is refusal
