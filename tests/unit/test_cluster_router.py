"""What the router makes of Ray's words about a replica, without a cluster."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any
from unittest import mock

import pytest

from llorch_serve.cluster.unreachable import Unreachable

ONE = mock.Mock(unique_id="one")
BASE = "ray.serve.request_router.RequestRouter"


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A router that Ray has told of no replica; what its base class is told is only counted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, of Pydantic
        from llorch_serve.cluster.router import PrefixRouter

    for name in ("on_new_queue_len_info", "on_replica_actor_unavailable", "on_replica_actor_died"):
        monkeypatch.setattr(f"{BASE}.{name}", mock.Mock())
    made = object.__new__(PrefixRouter)
    made._unreachable = Unreachable(lambda: 0.0)
    made._told = {ONE: ("one", 4, "f")}
    return made


def out(router: Any) -> bool:
    return ONE.unique_id in router._unreachable


def test_a_replica_that_answers_is_reached_again_be_it_full(router: Any) -> None:
    assert not out(router)
    router.on_replica_actor_unavailable(ONE)
    assert out(router)
    router.on_new_queue_len_info(ONE, 99)
    assert not out(router)


@pytest.mark.parametrize("said", ["3", "unavailable", "died"])
def test_the_router_hears_what_came_of_asking_a_replica(
    router: Any, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
    from ray.serve.request_router import RequestRouter, RunningReplica

    from llorch_serve.cluster.router import _Replica

    errors = {"unavailable": ActorUnavailableError("x", b"1" * 16), "died": ActorDiedError()}
    answer = errors.get(said, 3)
    monkeypatch.setattr(RunningReplica, "get_queue_len", mock.AsyncMock(side_effect=[answer]))
    monkeypatch.setattr(RunningReplica, "replica_id", ONE)

    async def ask() -> object:
        replica = object.__new__(_Replica)
        replica._router, replica._loop = router, asyncio.get_running_loop()
        try:
            found: object = await replica.is_there()
        except RayActorError as error:
            found = error
        await asyncio.sleep(0)  # for what the loop has been told
        return found

    if said == "3":
        router.on_replica_actor_unavailable(ONE)
        RequestRouter.on_replica_actor_unavailable.reset_mock()
    assert asyncio.run(ask()) is errors.get(said)
    assert out(router) is (said == "unavailable")
    counts = [
        getattr(RequestRouter, name).call_count
        for name in ("on_new_queue_len_info", "on_replica_actor_unavailable", "on_replica_actor_died")
    ]
    assert counts == [said == "3", said == "unavailable", said == "died"]
    if said == "3":
        RequestRouter.on_new_queue_len_info.assert_called_once_with(ONE, 3)


def test_of_a_replica_that_was_removed_meanwhile_nothing_is_kept(router: Any) -> None:
    from ray.serve.request_router import RequestRouter

    router.answered(mock.Mock(unique_id="another"), 3)
    assert not RequestRouter.on_new_queue_len_info.called
