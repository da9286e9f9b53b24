"""What the router needs of Ray Serve, tried on a deployment without a model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from llorch_serve.cluster import unreachable
from llorch_serve.cluster.interfaces import Probe, RoutingHint
from llorch_serve.cluster.prefix_index import Prefix, prefix_of
from llorch_serve.cluster.ray_internals import LARGE_REQUESTS, direct
from support.cluster import RayCluster

PATH = "llorch_serve.cluster.router.PrefixRouter"


def named() -> type:
    """Return a class that tells its name; made here, Ray pickles it by value and imports no test."""

    class Named:
        def record_replica_metadata(self) -> dict[str, Any]:
            return {"slots": 4, "fingerprint": "f"}

        async def name(self, hint: Any, seconds: float = 0.05) -> tuple[str, bool]:
            from ray import serve

            await asyncio.sleep(seconds)  # so that requests are there at once
            return serve.get_replica_context().replica_id.unique_id, hint.prefix is None

        async def echo(self, raw: bytes, times: int, hint: Any) -> AsyncIterator[bytes]:
            for _ in range(times):
                yield raw

    return Named


@pytest.fixture(scope="module")
def handle(cluster: RayCluster) -> Iterator[Any]:
    """A handle of two replicas of four slots."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    deployment = serve.deployment(named()).options(
        num_replicas=2,
        max_ongoing_requests=8,
        # So many that it does not matter when Ray learns that a request has ended.
        request_router_config=RequestRouterConfig(
            request_router_class=PATH, request_router_kwargs={"slack": 8}
        ),
        ray_actor_options={"num_cpus": 0.1, "runtime_env": {"env_vars": LARGE_REQUESTS}},
    )
    yield serve.run(deployment.bind(), name="router", route_prefix=None)
    serve.delete("router")


def prompt(number: int, length: int) -> Prefix:
    return prefix_of(list(range(1000 * number, 1000 * number + length)))


def ask(handle: Any, *hints: RoutingHint) -> list[str]:
    """Send requests at once; return who answered each."""
    answers = [one.result(timeout_s=20) for one in [handle.name.remote(hint) for hint in hints]]
    assert all(without for _, without in answers), "prompts do not leave the process"
    return [name for name, _ in answers]


def wait_until(happened: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.001)


def busy(handle: Any) -> list[str]:
    """Return the replicas that have requests: Ray tells of an end a little later than the caller knows it."""
    router = handle._router._asyncio_router.request_router
    return [one.unique_id for one in router.curr_replicas if router._in_flight.count(one.unique_id)]


def test_conversations_stay_where_they_began(handle: Any) -> None:
    first = ask(handle, *(RoutingHint("r", prefix=prompt(n, 40), fingerprint="f") for n in range(6)))
    assert len(set(first)) == 2
    for turn in range(2, 5):
        hints = [RoutingHint("r", prefix=prompt(n, 40 * turn), fingerprint="f") for n in range(6)]
        assert ask(handle, *hints) == first


def test_many_at_once_are_spread_though_none_has_been_sent_yet(handle: Any) -> None:
    # Fewer than one replica takes, which would get them all if only what has been sent were counted.
    names = ask(handle, *(RoutingHint("r", prefix=prompt(100 + n, 40)) for n in range(6)))
    assert min(names.count(name) for name in set(names)) >= 2
    assert len(set(names)) == 2


@pytest.mark.parametrize("turn", range(4))
def test_a_wave_of_requests_is_halved_though_what_replicas_say_of_themselves_is_older(
    handle: Any, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: not busy(handle))
    router = handle._router._asyncio_router.request_router
    monkeypatch.setattr(router.replica_queue_len_cache, "get", lambda _replica_id: 0)
    hints = [RoutingHint("r", prefix=prompt(700 + 20 * turn + n, 40)) for n in range(12)]
    # So long that the last is chosen for before the first ends.
    names = [one.result(timeout_s=20)[0] for one in [handle.name.remote(hint, 1.0) for hint in hints]]
    assert sorted(names.count(name) for name in set(names)) == [6, 6]


def test_a_replica_does_not_look_idle_when_ray_has_forgotten_its_count(handle: Any) -> None:
    wait_until(lambda: not busy(handle))
    router = handle._router._asyncio_router.request_router
    long = handle.name.remote(RoutingHint("r", prefix=prompt(400, 40)), 2.0)
    wait_until(lambda: busy(handle))
    (taken,) = busy(handle)
    for replica_id in router.curr_replicas:
        router.replica_queue_len_cache.invalidate_key(replica_id)
    assert taken not in ask(handle, RoutingHint("r", prefix=prompt(500, 40)))
    assert long.result(timeout_s=20)[0] == taken
    wait_until(lambda: not busy(handle))
    given_up = handle.name.remote(RoutingHint("r", prefix=prompt(600, 40)), 20.0)
    wait_until(lambda: busy(handle))
    given_up.cancel()
    wait_until(lambda: not busy(handle))


def test_one_that_failed_a_request_is_avoided_and_who_took_it_is_told(handle: Any) -> None:
    taken: list[str] = []
    hint = RoutingHint("r", prefix=prompt(200, 100), on_taken=taken.append)
    (name,) = ask(handle, hint)
    assert taken == [name]
    (other,) = ask(handle, replace(hint, avoid=frozenset({name})))
    assert taken == [name, other]
    assert other != name


def test_parts_that_come_by_grpc_may_be_of_any_size(handle: Any) -> None:
    raw = bytes(5 * 2**20)  # gRPC by itself ends at 4 MiB
    parts = list(direct(handle, "echo").remote(raw, 2, RoutingHint("r")))
    assert parts == [raw, raw]


def test_parts_come_as_objects_of_ray_where_addresses_have_colons(
    handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "2001:db8::1")
    response = direct(handle, "echo").remote(b"x", 2, RoutingHint("r"))
    assert (list(response), response.by_reference) == ([b"x", b"x"], True)


def test_a_replica_takes_nothing_by_grpc_without_the_clusters_token(handle: Any) -> None:
    from ray.serve.generated.serve_pb2 import ASGIRequest
    from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

    ask(handle, RoutingHint("r"))
    router = handle._router._asyncio_router.request_router
    info = next(iter(router.curr_replicas.values()))._replica_info
    with grpc.insecure_channel(f"{info.node_ip}:{info.port}") as channel:
        stub = ASGIServiceStub(channel)
        hostile = ASGIRequest(pickled_request_metadata=b"not even a pickle")
        for call in (stub.HandleRequest, lambda one: list(stub.HandleRequestWithRejectionStreaming(one))):
            with pytest.raises(grpc.RpcError) as refusal:
                call(hostile)
            assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_replica_can_be_asked_whether_it_is_there(handle: Any) -> None:
    told: list[tuple[str, Probe]] = []
    taken: list[str] = []
    hint = RoutingHint(
        "r",
        prefix=prompt(250, 40),
        on_sent=lambda name, probe: told.append((name, probe)),
        on_taken=taken.append,
    )
    assert list(direct(handle, "echo").remote(b"x", 1, hint)) == [b"x"]
    [(name, probe)] = told
    assert taken == [name]

    async def asked() -> object:
        return await probe()

    assert asyncio.run(asked()) is None


def test_a_slot_whose_answer_has_come_counts_as_free_before_ray_tells_of_its_end(handle: Any) -> None:
    wait_until(lambda: not busy(handle))
    over: set[str] = set()
    names: dict[str, list[str]] = {"0": [], "1": []}

    def hint(name: str) -> RoutingHint:
        return RoutingHint(
            name,
            prefix=prompt(900 + int(name), 40),
            on_taken=names[name].append if name in names else None,
            is_over=lambda: name in over,
        )

    both = [handle.name.remote(hint(name), 3.0) for name in names]
    wait_until(lambda: all(names.values()))
    over.add("1")
    assert ask(handle, hint("2")) == names["1"]
    assert {one.result(timeout_s=20)[0] for one in both} == {*names["0"], *names["1"]}


def test_one_that_cannot_be_reached_gets_nothing_for_a_while_and_then_again(
    handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unreachable, "FIRST_PAUSE_S", 4.0)  # a busy machine may take a second to choose
    wait_until(lambda: not busy(handle))
    router = handle._router._asyncio_router.request_router
    hint = RoutingHint("r", prefix=prompt(1000, 100))
    (name,) = ask(handle, hint)
    router.on_replica_actor_unavailable(next(one for one in router.curr_replicas if one.unique_id == name))
    (other,) = ask(handle, hint)
    assert other != name
    long = handle.name.remote(RoutingHint("r", prefix=prompt(1100, 40), avoid=frozenset({name})), 12.0)
    wait_until(lambda: busy(handle))
    wait_until(lambda: name not in router._unreachable)
    assert ask(handle, RoutingHint("r", prefix=prompt(1200, 40))) == [name]
    assert long.result(timeout_s=20)[0] == other


def test_a_request_for_another_fingerprint_waits_without_working_and_can_be_given_up(handle: Any) -> None:
    before = time.process_time()
    waiting = handle.name.remote(RoutingHint("r", fingerprint="other"))
    with pytest.raises(TimeoutError):
        waiting.result(timeout_s=1)
    assert time.process_time() - before < 0.5
    waiting.cancel()
    assert len(set(ask(handle, *(RoutingHint("r", prefix=prompt(300 + n, 40)) for n in range(2))))) == 2
