"""What an HTTP front tells of the replicas behind it, as ``llorch serve`` puts it together."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import pytest

from llorch_serve.calls.interfaces import ClosableGenerator
from llorch_serve.terminal.serving_fronts import open_fronts
from support.fakes.generator import LOAD, FakeGenerator
from support.fakes.replicas import FakeReplicas, replica_of, routed
from support.harness.http import send

HOSTILE = '<img src=x onerror="alert(1)">'


def told(generator: ClosableGenerator | None, path: str = "/load") -> Any:
    """Return what a front of a generator answers; None: one that is still loading."""
    made = open_fronts("0", None)
    observed = None if generator is None else made.observe(generator)

    async def ask() -> Any:
        front = made.fronts[0]((lambda: LOAD) if observed is None else observed.load)
        port = int((await front.bind()).rpartition(":")[2])
        try:
            if observed is not None:
                front.set_ready(observed)
            return (await asyncio.to_thread(send, port, "GET", path)).document
        finally:
            await front.close()

    try:
        return asyncio.run(ask())
    finally:
        if observed is not None:
            observed.close()


@pytest.mark.parametrize("names", [("b", HOSTILE), ()])
def test_a_front_tells_of_each_replica(names: tuple[str, ...]) -> None:
    generators = [FakeGenerator() for _ in names]
    known = FakeGenerator()
    replicas = FakeReplicas(replica_of(known))
    front_of = FakeReplicas(*map(replica_of, generators, names)) if names else replicas
    if not names:

        async def none() -> list[Any]:
            return []

        front_of.loads = none  # type: ignore[method-assign]
    found = told(routed(known, replicas=front_of))["replicas"]
    assert [one["replica"] for one in found] == sorted(names)
    for one in found:
        figures = {"running": 1, "waiting": LOAD.waiting, "slots": LOAD.slots}
        assert {name: one[name] for name in figures} == figures
        assert one["tokens_per_second"] == LOAD.tokens_per_second
        assert one["memory_bytes"] > 2**20
        assert set(one) == {"replica", *figures, "tokens_per_second", "memory_bytes"}
    for each in (known, *generators):
        each.close()


def test_a_worker_tells_what_it_told() -> None:
    assert set(told(FakeGenerator())) == set(asdict(LOAD)) - {"stages"}
    assert "replicas" not in told(FakeGenerator(), "/health")


def test_a_front_that_is_loading_tells_of_no_replicas() -> None:
    assert "replicas" not in told(None)
