"""A front serves while a replica is there, and ends requests that wait for none."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from llorch_serve.calls.interfaces import spread_of
from llorch_serve.cluster import presence
from llorch_serve.cluster.interfaces import ReplicaLoad, RoutingHint
from llorch_serve.cluster.routed_call import RoutedCall
from llorch_serve.cluster.routed_calls import RoutedCalls
from llorch_serve.errors import UnavailableError
from llorch_serve.observe.tap import ObservedGenerator
from llorch_serve.requests import GenerationRequest, TextPrompt
from llorch_serve.rpc import worker_pb2 as pb
from support.fakes.generator import LOAD, PATIENCE_S, FakeGenerator
from support.fakes.replicas import FakeReplicas, replica_of, routed
from support.fakes.virtual_time import run_virtually
from support.harness.rpc import open_stub, running_server
from support.harness.worker import Sink


class Leaving(FakeReplicas):
    """Replicas that can all be gone, so that requests wait."""

    def __init__(self, *replicas):
        super().__init__(*replicas)
        self.gone = False

    async def call(self, kind, raw, *, hint):
        while self.gone:
            await asyncio.sleep(0.001)
        async for part in super().call(kind, raw, hint=hint):
            yield part

    async def loads(self):
        return () if self.gone else await super().loads()


@pytest.fixture
def front(monkeypatch):
    monkeypatch.setattr(presence, "ABSENT_S", 0.05)
    monkeypatch.setattr(presence, "WAIT_S", 0.2)
    generator = FakeGenerator()
    made = routed(generator, replicas=Leaving(replica_of(generator)), load_interval_s=0.01)
    yield made
    made.close()
    generator.close()


def test_health_says_whether_a_replica_is_there(front):
    replicas = front._replicas
    with running_server() as running, grpc.insecure_channel(running.address) as channel:
        running.call(running.server.set_ready(front))
        front.when_answerable(
            lambda yes: running.loop.call_soon_threadsafe(running.server.set_answerable, yes)
        )
        with open_stub(running.address) as stub:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=PATIENCE_S
            )
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            replicas.gone = True
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError) as refused:
                stub.Generate(pb.GenerateRequest(input=pb.Input(text="a")))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "no replica" in refused.value.details()
            replicas.gone = False
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            asked = pb.GenerateRequest(input=pb.Input(text="a"), sampling=pb.Sampling(max_tokens=1))
            assert stub.Generate(asked).choices


def test_what_waits_for_a_replica_that_does_not_come_ends(front):
    front._replicas.gone = True
    sink = Sink()
    front.submit(GenerationRequest("r", TextPrompt("a")), sink)
    assert type(sink.answers("r")["r"].error) is UnavailableError
    front._replicas.gone = False
    front.submit(GenerationRequest("r", TextPrompt("a")), again := Sink())
    assert again.answers("r")["r"].updates[-1].completion is not None


class Later:
    """A loop that does what is to be done when a test says so."""

    def __init__(self):
        self.acts = []

    def call_soon(self, act):
        self.acts.append(act)


def test_what_is_given_up_before_it_has_begun_ends_once_and_leaves_its_id_to_the_next():
    def call():
        sink = Sink()
        return sink, RoutedCall("embed", b"", RoutingHint("r", ""), sink, answers=1, again=None)

    (first_sink, first), (_, second), later = call(), call(), Later()
    calls = RoutedCalls(FakeReplicas(), later)
    calls.enter(first)
    calls.give_up_waiting()
    calls.enter(second)
    later.acts[0]()
    [update] = first_sink.answers("r")["r"].updates
    assert isinstance(update.error, UnavailableError)
    assert calls.find("r") is second


def test_observers_do_not_hide_that_there_are_replicas(front):
    observed = ObservedGenerator(front, ())
    assert spread_of(observed) is spread_of(front) is front
    assert spread_of(FakeGenerator) is None
    assert spread_of(None) is None


def test_an_abort_reaches_a_request_of_another_front():
    generator = FakeGenerator(free_running=False)
    shared = FakeReplicas(replica_of(generator))
    fronts = [routed(generator, replicas=shared) for _ in range(2)]
    try:
        with (
            running_server(fronts[0]) as a,
            running_server(fronts[1]) as b,
            open_stub(a.address) as mine,
            open_stub(b.address) as others,
        ):
            asked = pb.GenerateRequest(input=pb.Input(text="a"), request_id="r")
            call = mine.Generate.future(asked, timeout=PATIENCE_S)
            generator.wait_for(lambda g: g.live_ids == ["r"])
            ended = others.Abort(pb.AbortRequest(request_ids=["x", "r"]), timeout=PATIENCE_S)
            assert list(ended.request_ids) == ["r"]
            assert call.code() is grpc.StatusCode.CANCELLED
    finally:
        for front in fronts:
            front.close()
        generator.close()


def test_a_replica_of_another_model_is_none(front):
    replicas = front._replicas
    other = replicas.replicas[0]
    other.description = replace(other.description, info=replace(other.description.info, fingerprint="x"))
    sink = Sink()
    front.submit(GenerationRequest("r", TextPrompt("a")), sink)
    assert type(sink.answers("r")["r"].error) is UnavailableError


class Many:
    """Replicas that only say how busy they are."""

    def __init__(self, count):
        self.looks = 0
        self._said = [ReplicaLoad(f"r{number}", "f", LOAD) for number in range(count)]

    async def loads(self):
        self.looks += 1
        return self._said


class Said(FakeReplicas):
    """Replicas of which only those say how busy they are that are told to, and that show who is avoided."""

    def __init__(self, *replicas):
        super().__init__(*replicas)
        self.names = ["a", "b"]
        self.avoided = []

    async def call(self, kind, raw, *, hint):
        self.avoided.append(hint.avoid)
        async for part in super().call(kind, raw, hint=hint):
            yield part

    async def loads(self):
        return [ReplicaLoad(name, "f", LOAD) for name in self.names]


@pytest.mark.parametrize(
    ("names", "avoided"), [(["a", "b"], set()), (["b"], {"a"}), (["b", "c"], {"a"}), ([], set())]
)
def test_a_request_avoids_a_replica_that_says_nothing_while_others_do(names, avoided):
    generator = FakeGenerator()
    replicas = Said(replica_of(generator))
    front = routed(generator, replicas=replicas, load_interval_s=1000)
    try:
        replicas.names = names
        front._loop.run(front._presence.look())
        front.submit(GenerationRequest("r", TextPrompt("a")), sink := Sink())
        assert sink.answers("r")["r"].updates[-1].completion is not None
        assert replicas.avoided == [avoided]
    finally:
        front.close()
        generator.close()


def test_a_replica_that_says_nothing_for_long_is_forgotten():
    replicas = Many(2)

    async def look_again(after_s):
        looking = presence.Presence(replicas, "f", lambda: None, 1.0)
        await looking.look()
        replicas._said.pop(0)
        await asyncio.sleep(after_s)
        await looking.look()
        return looking.silent

    assert run_virtually(lambda _: look_again(presence.FORGOTTEN_S - 1)) == {"r0"}
    replicas = Many(2)
    assert run_virtually(lambda _: look_again(presence.FORGOTTEN_S + 1)) == set()


@pytest.mark.parametrize(("count", "looks"), [(0, 11), (50, 11), (250, 3)])
def test_many_replicas_are_asked_more_seldom(count, looks):
    replicas = Many(count)

    async def watch_for_ten_seconds():
        looking = presence.Presence(replicas, "f", lambda: None, 1.0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(looking.watch(), 10.5)

    run_virtually(lambda _: watch_for_ten_seconds())
    assert replicas.looks == looks


def test_requests_may_wait_while_replicas_of_another_model_run(monkeypatch):
    monkeypatch.setattr(presence, "ABSENT_S", 0.01)
    monkeypatch.setattr(presence, "WAIT_S", 0.2)
    told, given_up = [], []

    class Others:
        async def loads(self):
            return [ReplicaLoad("r", "another", LOAD)]

    async def watch():
        began = asyncio.get_running_loop().time()
        over = asyncio.Event()

        def give_up():
            given_up.append(asyncio.get_running_loop().time() - began)
            over.set()

        seen = presence.Presence(Others(), "ours", give_up, 0.005)
        seen.when_answerable(lambda yes: told.append((yes, asyncio.get_running_loop().time() - began)))
        watching = asyncio.ensure_future(seen.watch())
        await asyncio.wait_for(over.wait(), PATIENCE_S)
        assert seen.others == {"another"}
        seen.retire()
        watching.cancel()

    asyncio.run(watch())
    [(yes, after_s)] = told
    assert not yes
    assert after_s >= 0.2
    assert given_up[0] >= 0.2
