"""A front over replicas answers as a worker does; replicas find requests checked and encoded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from llorch_serve.cluster import routed_calls, wire
from llorch_serve.cluster.interfaces import ReplicaLoad
from llorch_serve.cluster.prefix_index import prefix_of
from llorch_serve.cluster.replica import ServedReplica
from llorch_serve.cluster.routed_generator import open_routed
from llorch_serve.cluster.totals import Replicated
from llorch_serve.config import CacheSharing
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import (
    EngineStoppedError,
    InvalidRequestError,
    ModelMismatchError,
    UnavailableError,
    UnsupportedError,
)
from llorch_serve.requests import (
    AnswerOptions,
    ChatMessage,
    ChatPrompt,
    EmbedRequest,
    GenerationRequest,
    RankRequest,
    ScoreRequest,
    TextPrompt,
    TokenPrompt,
)
from llorch_serve.worker.worker import Worker
from support.fakes.generator import FakeGenerator
from support.fakes.replicas import FakeReplicas, reader_of, replica_of, replicas_of, routed
from support.harness.worker import Answer, Sink, make_worker, request

CHAT = ChatPrompt((ChatMessage("user", "Hello"), ChatMessage("assistant", "Hi")), continue_final_message=True)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = make_worker(tmp_path_factory.mktemp("artifact"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def front(worker: Worker) -> Iterator[object]:
    made = routed(worker)
    yield made
    made.close()


def answer(generator, asked) -> Answer:
    sink = Sink()
    generator.submit(asked, sink)
    return sink.answers(asked.request_id)[asked.request_id]


@pytest.mark.parametrize(
    "asked",
    [
        request("text", TextPrompt("Hello there"), max_tokens=8, seed=3),
        request("ids", (1, 2, 3), max_tokens=8, temperature=1, seed=5, logprobs=2),
        request("chat", CHAT, max_tokens=8, seed=3),
        request("echo", TextPrompt("Hello there"), max_tokens=4, echo=True, prompt_logprobs=1, seed=3),
        request("several", (4, 5), max_tokens=5, n=3, temperature=1, seed=9),
        request("best", (4, 5), max_tokens=5, n=2, best_of=3, temperature=1, seed=9),
        request("none", (4, 5), max_tokens=0, seed=3),
    ],
    ids=lambda asked: asked.request_id,
)
def test_an_answer_is_a_workers(worker, front, asked):
    def told(generator):
        found = answer(generator, asked)
        parts = [(u.index, u.text, u.token_ids, u.logprobs, u.prompt_logprobs) for u in found.updates]
        columns: dict[int, list[list[object]]] = {}
        for index, *values in parts:
            kept = columns.setdefault(index, [[] for _ in values])
            for place, value in enumerate(values):
                kept[place] += value
        ends = [
            (u.index, u.completion.reason, u.completion.seed, u.completion.prompt_tokens)
            for u in found.updates
            if u.completion is not None
        ]
        return columns, sorted(ends), found.updates[-1].open_answers

    assert told(front) == told(worker)


def test_a_prompt_is_encoded_once(worker, front, monkeypatch):
    encode, seen = worker._prompts.encode, []
    monkeypatch.setattr(
        worker._prompts, "encode", lambda prompt, **how: seen.append(1) or encode(prompt, **how)
    )
    for asked in (request("a", TextPrompt("Hello"), max_tokens=1), request("b", CHAT, max_tokens=1)):
        answer(front, asked)
    assert len(seen) == 2


def test_scores_are_a_workers(worker, front):
    asked = ScoreRequest("s", TextPrompt("Hello "), (TextPrompt("there"), TokenPrompt((3, 4))), logprobs=1)
    empty = ScoreRequest("e", TextPrompt(""), (TextPrompt("there"),))

    def told(generator, one):
        sink = Sink()
        generator.submit_score(one, sink)
        return [update.score for update in sink.answers(one.request_id)[one.request_id].updates]

    for one in (asked, empty):
        ours, theirs = told(front, one), told(worker, one)
        assert [(s.logprob, s.token_count, s.context_tokens, s.logprobs) for s in ours] == [
            (s.logprob, s.token_count, s.context_tokens, s.logprobs) for s in theirs
        ]


def test_every_bad_field_is_named_before_a_replica_is_asked(worker, front):
    asked = request("r", (600,), temperature=9, top_p=0)
    with pytest.raises(InvalidRequestError) as ours:
        front.submit(asked, Sink())
    with pytest.raises(InvalidRequestError) as theirs:
        worker.submit(asked, Sink())
    assert ours.value.violations == theirs.value.violations


def test_what_the_model_cannot_do_is_told_in_a_replicas_words(front):
    sink = Sink()
    front.submit_embedding(EmbedRequest("e", (TextPrompt("a"),)), sink)
    front.submit_rank(RankRequest("k", "q", ("d",)), sink)
    found = sink.answers("e", "k")
    assert isinstance(found["e"].error, UnsupportedError)
    assert "--embed" in str(found["e"].error)
    assert isinstance(found["k"].error, UnsupportedError)


def test_a_live_id_is_refused_and_free_again_when_its_end_is_told():
    generator = FakeGenerator(free_running=False)
    front, sink = routed(generator), Sink()
    try:
        abort = front.submit(GenerationRequest("r", TextPrompt("a")), sink)
        with pytest.raises(InvalidRequestError, match="live request"):
            front.submit(GenerationRequest("r", TextPrompt("a")), Sink())
        abort()
        assert sink.answers("r")["r"].completion.reason is FinishReason.CANCELLED
        again = Sink()
        front.submit(request("r", TextPrompt("a"), max_tokens=1), again)
        generator.run_freely()
        assert again.answers("r")["r"].completion.reason is FinishReason.LENGTH
        abort()  # of the first one: no longer of effect
    finally:
        front.close()
        generator.close()


def test_two_fronts_may_have_the_same_id_and_either_ends_those_of_its_caller():
    generator = FakeGenerator(free_running=False)
    replicas = [FakeReplicas(replica_of(generator, "only"))] * 2
    fronts = [routed(generator), routed(generator)]
    for front in fronts:
        front._replicas = front._calls._replicas = replicas[0]
    sinks = [Sink(), Sink()]
    try:
        for front, sink, owner in zip(fronts, sinks, ("mine", "theirs"), strict=True):
            front.submit(GenerationRequest("r", TextPrompt("a"), owner=owner), sink)
        generator.wait_for(lambda g: len(g.live_ids) == 2)
        assert fronts[1].abort_everywhere(["r", "other"], "mine") == ("r",)
        assert sinks[0].answers("r")["r"].completion.reason is FinishReason.CANCELLED
        generator.wait_for(lambda g: len(g.live_ids) == 1)
    finally:
        for front in fronts:
            front.close()
        generator.close()


def test_all_answers_of_an_aborted_request_end_cancelled():
    generator = FakeGenerator(free_running=False)
    front, sink = routed(generator), Sink()
    try:
        asked = GenerationRequest("r", TextPrompt("a"), answers=AnswerOptions(n=3))
        front.submit(asked, sink)()
        updates = sink.answers("r")["r"].updates
        assert [(u.index, u.open_answers) for u in updates] == [(0, 2), (1, 1), (2, 0)]
    finally:
        front.close()
        generator.close()


def test_requests_for_another_model_are_no_replicas_business(worker):
    front, sink = routed(worker), Sink()
    front._info = replace(front._info, fingerprint="other")
    try:
        front.submit(request("r", (1,)), sink)
        assert isinstance(sink.answers("r")["r"].error, (ModelMismatchError, UnavailableError))
    finally:
        front.close()


def test_a_closed_front_takes_nothing_and_ends_what_ran():
    generator = FakeGenerator(free_running=False)
    front, sink = routed(generator), Sink()
    front.submit(GenerationRequest("r", TextPrompt("a")), sink)
    front.close()
    front.close()
    assert sink.answers("r")["r"].completion.reason is FinishReason.CANCELLED
    with pytest.raises(UnavailableError, match="shutting down"):
        front.submit(GenerationRequest("s", TextPrompt("a")), sink)
    generator.close()


def test_a_replica_whose_engine_has_died_says_so_to_health_checks():
    generator = FakeGenerator()
    replica = replica_of(generator)
    replica.check_health()
    generator.die(EngineStoppedError("4711"))
    with pytest.raises(UnavailableError, match="4711"):
        replica.check_health()
    generator.close()


def test_a_long_part_of_an_answer_is_not_read_where_others_are_passed_on(worker, monkeypatch):
    read, threads = wire.read_updates, []

    def noting(request_id, raw):
        threads.append(threading.current_thread().name)
        return read(request_id, raw)

    monkeypatch.setattr(wire, "read_updates", noting)
    monkeypatch.setattr(routed_calls, "MOST_AT_ONCE_BYTES", 100)
    front = routed(worker)
    try:
        asked = request("r", TextPrompt("Hello there"), max_tokens=1, prompt_logprobs=5)
        assert answer(front, asked).updates[-1].completion is not None
    finally:
        front.close()
    assert threads
    assert "llorch-routing" not in threads


def test_a_front_that_waits_for_a_first_replica_can_be_told_to_end(worker):
    replicas, checked = replicas_of(worker), []

    async def describe():
        await asyncio.Event().wait()

    def check():
        checked.append(None)
        if len(checked) == 3:
            raise UnavailableError("the load was given up")

    replicas.describe = describe
    with pytest.raises(UnavailableError, match="given up"):
        open_routed(replicas, lambda told: reader_of(worker, told), check=check, check_s=0.001)


class SeenTwice(FakeReplicas):
    """Tells when a front has taken its first look, which is as it takes the second."""

    def __init__(self, *replicas: ServedReplica) -> None:
        super().__init__(*replicas)
        self.looks = 0
        self.seen = threading.Event()

    async def loads(self) -> Sequence[ReplicaLoad]:
        self.looks += 1
        if self.looks == 2:
            self.seen.set()
        return await super().loads()


def test_a_front_tells_what_its_replicas_are_together_and_each_alone():
    first, second = FakeGenerator(), FakeGenerator()
    replicas = SeenTwice(replica_of(first, "a"), replica_of(second, "b"))
    front = open_routed(replicas, lambda told: reader_of(first, told), load_interval_s=0.001)
    try:
        assert replicas.seen.wait(20)
        totals = front.totals()
        assert isinstance(front, Replicated)
        assert front.load() == totals.load
        assert [each.replica for each in totals.replicas] == ["a", "b"]
        assert (totals.load.slots, totals.load.running) == (16, 2)
        assert totals.memory_bytes > 2**20
        assert totals.device_memory_bytes is None
    finally:
        front.close()
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("sharing", "salts"),
    [(CacheSharing.CALLER, ["o", "o"]), (CacheSharing.CLIENT, ["o/a", "o/b"]), (CacheSharing.ALL, ["", ""])],
)
def test_prompts_are_looked_up_by_what_replicas_share(worker, sharing, salts):
    replicas = replicas_of(worker)
    replicas.replicas[0].description = replace(replicas.replicas[0].description, cache_sharing=sharing)
    front, sink = routed(worker, replicas=replicas), Sink()
    try:
        for client in "ab":
            asked = replace(request(client, (1, 2, 3), max_tokens=1), owner="o", client_id=client)
            front.submit(asked, sink)
        sink.answers("a", "b")
        found = {hint.request_id: hint.prefix for hint in replicas.hints}
        assert [found[client] for client in "ab"] == [prefix_of((1, 2, 3), salt) for salt in salts]
    finally:
        front.close()
