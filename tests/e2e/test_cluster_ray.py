"""A front over two replicas of the tiny model that Ray runs: the same answers, and what happens when one
ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.cluster import failures, handles
from llorch_serve.cluster.deploy import (
    DEPLOYMENT,
    application_of,
    await_running,
    delete,
    deploy,
)
from llorch_serve.cluster.front_model import open_front_model
from llorch_serve.cluster.handles import find_replicas
from llorch_serve.cluster.ray_internals import applications
from llorch_serve.cluster.routed_generator import RoutedGenerator, open_routed
from llorch_serve.cluster.settings import ReplicaSettings
from llorch_serve.cluster.spec import ModelSpec, ReplicaRange
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.errors import InvalidRequestError, QueueFullError, ReplicaLostError
from llorch_serve.loading.worker import load_worker
from llorch_serve.observe.replica import ObservedReplica
from llorch_serve.requests import (
    AnswerOptions,
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    ScoreRequest,
    TextPrompt,
    TokenPrompt,
)
from llorch_serve.sampling.params import SamplingParams
from support.cluster import RayCluster
from support.harness.collector import SpanCollector, span_collector
from support.harness.rpc import running_server
from support.harness.worker import Sink

PATIENCE_S = 120.0
SLOTS = 4


@dataclass
class Deployed:
    folder: Path
    fingerprint: str

    @contextlib.contextmanager
    def front(self, **options: object) -> Iterator[RoutedGenerator]:
        replicas = find_replicas("tiny", self.fingerprint)
        made = open_routed(replicas, lambda told: open_front_model(self.folder, told), **options)
        try:
            yield made
        finally:
            made.close()

    def ongoing(self) -> list[int]:
        """Return how many requests each replica has, as Ray counts them."""
        import ray

        found = applications()[application_of("tiny")].deployments[DEPLOYMENT].replicas
        actors = [ray.get_actor(one.actor_name, namespace="serve") for one in found]
        return ray.get([actor.get_num_ongoing_requests.remote() for actor in actors])

    def processes(self) -> dict[str, int]:
        """Return the numbers of the replicas' processes, by their names."""
        found = applications()[application_of("tiny")].deployments[DEPLOYMENT].replicas
        return {one.replica_id: one.pid for one in found if one.state.value == "RUNNING"}


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanCollector]:
    with span_collector() as made:
        yield made


@pytest.fixture(scope="module")
def deployed(cluster: RayCluster, long: Path, collector: SpanCollector) -> Iterator[Deployed]:
    fingerprint = load_artifact(long).manifest.fingerprint
    engine = EngineConfig(session=SessionConfig(slots=SLOTS, max_context=4096))
    settings = ReplicaSettings(
        model="tiny",
        artifact=str(long),
        fingerprint=fingerprint,
        version="0.1.0",
        cores=1,
        engine=engine,
        otlp_endpoint=collector.url,
    )
    deploy([ModelSpec(settings, ReplicaRange(2, 2), max_queued=64)], ObservedReplica)
    await_running(["tiny"], PATIENCE_S, lambda _: None)
    yield Deployed(long, fingerprint)
    delete(["tiny"])


@pytest.fixture(scope="module")
def front(deployed: Deployed) -> Iterator[RoutedGenerator]:
    with deployed.front() as made:
        yield made


def asked(name: str, tokens: int = 8, prompt: object = None, **sampling: object) -> GenerationRequest:
    params = SamplingParams(temperature=1, seed=7, max_tokens=tokens, ignore_eos=True, **sampling)
    return GenerationRequest(name, prompt or TokenPrompt((1, 2, 3)), params)


def wait_until(happened) -> float:
    began = time.monotonic()
    while not happened():
        assert time.monotonic() - began < PATIENCE_S, "it never happened"
        time.sleep(0.01)
    return time.monotonic() - began


def test_answers_over_a_wire_are_those_of_a_worker(deployed, front):
    requests = [
        asked("ids", logprobs=1),
        asked("text", prompt=TextPrompt("Hello there")),
        asked("chat", prompt=ChatPrompt((ChatMessage("user", "Hello"),))),
    ]
    config = EngineConfig(session=SessionConfig(slots=SLOTS, max_context=4096, threads=1))
    worker = load_worker(deployed.folder, config, lambda _: None)
    try:
        with (
            running_server(front) as ours,
            running_server(worker) as theirs,
            WorkerClient(ours.address) as a,
            WorkerClient(theirs.address) as b,
        ):
            for one in requests:
                (x,), (y,) = a.complete(one), b.complete(one)
                assert (x.text, x.token_ids, x.logprobs) == (y.text, y.token_ids, y.logprobs)
                assert [u.token_ids for u in a.generate(one)] != []
            several = GenerationRequest(
                "n", TokenPrompt((1,)), SamplingParams(max_tokens=4, seed=1), answers=AnswerOptions(n=3)
            )
            assert [x.token_ids for x in a.complete(several)] == [y.token_ids for y in b.complete(several)]
            score = ScoreRequest("s", TextPrompt("Hello "), (TextPrompt("there"), TextPrompt("you")))
            assert [x.logprob for x in a.score(score)] == [y.logprob for y in b.score(score)]
            with pytest.raises(InvalidRequestError, match="temperature"):
                a.complete(GenerationRequest("bad", TokenPrompt((1,)), SamplingParams(temperature=9)))
            assert a.model_info().fingerprint == b.model_info().fingerprint
    finally:
        worker.close()


def test_replicas_send_spans_under_the_one_that_a_request_names(front, collector):
    trace, parent, sink = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", Sink()
    front.submit(replace(asked("traced"), traceparent=f"00-{trace}-{parent}-01"), sink)
    (update,) = (each for each in sink.answers("traced")["traced"].updates if each.is_last)
    assert len(update.replicas) == 1
    (span,) = collector.of_trace(trace)
    assert span.parent_span_id.hex() == parent


def test_failures_are_known_by_names_that_ray_has(cluster):
    import ray.exceptions
    import ray.serve.exceptions

    named = failures._LOST | failures._FULL | failures._ABSENT
    known = vars(ray.exceptions).keys() | vars(ray.serve.exceptions).keys()
    assert named - known == set()


def taken(front: RoutedGenerator, name: str) -> str | None:
    """Return the replica that has a live request."""
    call = front._calls.find(name)
    return None if call is None else call._taken


def begin(front: RoutedGenerator, *requests: GenerationRequest) -> dict[str, Sink]:
    """Submit requests and wait until each has been told something."""
    sinks = {one.request_id: Sink() for one in requests}
    for one in requests:
        front.submit(one, sinks[one.request_id])
    for sink in sinks.values():
        sink.next()
    return sinks


@pytest.mark.slow
def test_a_replica_that_is_killed_costs_the_streams_it_made_and_nothing_else(deployed, front):
    streams = begin(front, *(asked(f"long-{n}", 1500, TokenPrompt((n + 1,))) for n in range(4)))
    where = {name: taken(front, name) for name in streams}
    assert len(set(where.values())) == 2, where
    victim = where["long-0"]
    at = time.monotonic()
    os.kill(deployed.processes()[victim], signal.SIGKILL)
    few = Sink()
    for n in range(20):
        front.submit(asked(f"few-{n}", 4, TokenPrompt((n + 9,))), few)
    told = streams["long-0"].answers("long-0")["long-0"].error
    lost_s = time.monotonic() - at
    assert type(told) is ReplicaLostError
    names = [f"few-{n}" for n in range(20)]
    assert [len(answer.ids) for answer in few.answers(*names).values()] == [4] * 20
    for name, sink in streams.items():
        found = sink.answers(name)[name]
        if where[name] == victim:
            assert type(found.error) is ReplicaLostError
        else:
            assert len(found.ids) == 1500
    wait_until(lambda: len(set(deployed.processes()) - {victim}) == 2)
    back_s = time.monotonic() - at
    print(f"lost after {lost_s:.2f} s, capacity after {back_s:.1f} s")  # noqa: T201 - with -s
    assert lost_s < 5


@pytest.mark.slow
def test_a_stream_goes_on_elsewhere_with_the_ids_of_an_undisturbed_run(deployed, caplog):
    wait_until(lambda: len(deployed.processes()) == 2)
    with deployed.front(resume_streams=True) as front:
        request = asked("r", 1500)
        undisturbed = Sink()
        front.submit(request, undisturbed)
        expected = undisturbed.answers("r")["r"]
        (sink,) = begin(front, request).values()
        at = time.monotonic()
        victim = taken(front, "r")
        os.kill(deployed.processes()[victim], signal.SIGKILL)
        found = sink.answers("r")["r"]
        assert "a replica was lost" in caplog.text
        assert (found.ids, found.text) == (expected.ids, expected.text)
        assert found.completion.prompt_tokens == expected.completion.prompt_tokens
        print(f"whole after {time.monotonic() - at:.2f} s")  # noqa: T201 - as above
        wait_until(lambda: len(set(deployed.processes()) - {victim}) == 2)


@pytest.mark.slow
def test_a_replica_that_stands_still_holds_up_no_other(deployed):
    wait_until(lambda: len(deployed.processes()) == 2)
    with deployed.front() as front:
        told: list[bool] = []
        front.when_answerable(told.append)
        streams = begin(front, *(asked(f"still-{n}", 1500, TokenPrompt((n + 1,))) for n in range(4)))
        victim = taken(front, "still-0")
        stopped = deployed.processes()[victim]
        os.kill(stopped, signal.SIGSTOP)
        try:
            at = time.monotonic()
            wait_until(lambda: front.load().slots == SLOTS)
            few = Sink()
            names = [f"few-{n}" for n in range(20)]
            for name in names:
                front.submit(asked(name, 4, TokenPrompt((int(name[4:]) + 9,))), few)
            assert [len(answer.ids) for answer in few.answers(*names).values()] == [4] * 20
            print(f"answered beside it after {time.monotonic() - at:.1f} s")  # noqa: T201 - as above
        finally:
            os.kill(stopped, signal.SIGCONT)
        wait_until(lambda: front.load().slots == 2 * SLOTS)
        assert [len(sink.answers(name)[name].ids) for name, sink in streams.items()] == [1500] * 4
        assert told == []


def test_what_is_cancelled_frees_its_slot(deployed, front):
    wait_until(lambda: len(deployed.processes()) == 2)
    sinks, aborts = {}, {}
    for n in range(2 * SLOTS):
        sinks[n] = Sink()
        aborts[n] = front.submit(asked(f"c-{n}", 3000, TokenPrompt((n + 1,))), sinks[n])
    for sink in sinks.values():
        sink.next()
    at = time.monotonic()
    for abort in aborts.values():
        abort()
    freed = Sink()
    for n in range(2 * SLOTS):
        front.submit(asked(f"d-{n}", 1, TokenPrompt((n + 1,))), freed)
    freed.answers(*(f"d-{n}" for n in range(2 * SLOTS)))
    print(f"slots free after {time.monotonic() - at:.2f} s")  # noqa: T201 - as above


def test_a_replica_that_hangs_hides_no_other(deployed, front, monkeypatch):
    monkeypatch.setattr(handles, "LOOK_S", 0.5)  # an answer of 4,000 tokens takes some seconds
    wait_until(lambda: len(deployed.processes()) == 2)
    (stuck, process), (other, _) = deployed.processes().items()
    begin(front, asked("h-0", 4000), asked("h-1", 4000, TokenPrompt((9,))))
    names = {taken(front, name): name for name in ("h-0", "h-1")}
    assert set(names) == {stuck, other}
    os.kill(process, signal.SIGSTOP)
    try:
        seen = front._loop.run(front._replicas.loads())
        assert [load.replica for load in seen] == [other]
        assert front.abort_everywhere(tuple(names.values()), "") == (names[other],)
    finally:
        os.kill(process, signal.SIGCONT)
    front.abort_everywhere(tuple(names.values()), "")
    assert len(front._loop.run(front._replicas.loads())) == 2


def test_what_finds_no_room_is_told_when_to_come_back_and_nothing_hangs(front):
    sink = Sink()
    aborts = [front.submit(asked(f"o-{n}", 3000), sink) for n in range(120)]
    while not any(update.error is not None for update in sink.next()):
        pass
    for abort in aborts:
        abort()
    ends = [found.updates[-1] for found in sink.answers(*(f"o-{n}" for n in range(120))).values()]
    refusals = [end.error for end in ends if end.error is not None]
    assert {type(error) for error in refusals} == {QueueFullError}
    assert all(error.retry_after_s > 0 for error in refusals)
    assert len(refusals) < 120
    again = Sink()
    front.submit(asked("after", 4), again)
    assert len(again.answers("after")["after"].ids) == 4


def test_after_200_cancelled_streams_nothing_goes_on(deployed, front):
    gate = threading.Semaphore(12)

    class Leaving(Sink):
        def deliver(self, updates):
            super().deliver(updates)
            if updates[-1].is_last:
                gate.release()
            elif self.abort is not None:
                self.abort()

        abort = None

    sinks = []
    for n in range(200):
        gate.acquire()
        sink = Leaving()
        sinks.append(sink)
        sink.abort = front.submit(asked(f"l-{n}", 2000, TokenPrompt((n + 1,))), sink)
        if n % 3 == 0:
            sink.abort()
    for n, sink in enumerate(sinks):
        sink.answers(f"l-{n}")
    assert front._calls._live == {}
    wait_until(lambda: (front.load().running, front.load().waiting) == (0, 0))
    wait_until(lambda: deployed.ongoing() == [0, 0])
