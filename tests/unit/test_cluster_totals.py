"""What replicas are together: sums, and counters that never go back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llorch_serve.cluster import totals as module
from llorch_serve.cluster.interfaces import ReplicaLoad
from llorch_serve.cluster.memory import INTERVAL_S, ProcessMemory
from llorch_serve.cluster.totals import Tally
from llorch_serve.engine.load import NOTHING, Load, WorkerState
from support.fakes.generator import LOAD


def of(replica: str, load: Load = LOAD, *, fingerprint: str = "f", **memory: Any) -> ReplicaLoad:
    return ReplicaLoad(replica, fingerprint, load, **memory)


def test_figures_are_summed_over_the_replicas_of_the_model() -> None:
    other = replace(LOAD, running=5, tokens_per_second=2.5)
    found = Tally("f").look([of("b", other), of("a"), of("c", fingerprint="other")])
    assert [each.replica for each in found.replicas] == ["a", "b"]
    assert (found.load.running, found.load.waiting, found.load.slots) == (6, 4, 16)
    assert (found.load.kv_tokens_running, found.load.kv_tokens_idle) == (6, 8)
    assert found.load.kv_tokens_total == 2**34
    assert (found.load.prompt_tokens, found.load.cached_tokens, found.load.generated_tokens) == (12, 14, 16)
    assert (found.load.drafted_tokens, found.load.accepted_tokens) == (18, 20)
    assert (found.load.tokens_per_second, found.load.state) == (2.5, WorkerState.READY)


def test_every_figure_of_a_load_is_summed_or_of_the_front() -> None:
    summed = {*module._COUNTERS, *module._MOMENTARY}
    assert set(Load.__dataclass_fields__) - summed == {"state", "load_percent", "stages"}


def test_no_replica_is_nothing() -> None:
    found = Tally("f").look([])
    assert found.load == replace(NOTHING, state=WorkerState.READY)
    assert (found.replicas, found.memory_bytes, found.device_memory_bytes) == ((), 0, None)


def test_memory_is_summed_and_that_of_devices_only_where_all_know_it() -> None:
    tally = Tally("f")
    known = of("a", memory_bytes=5, device_memory_bytes=7)
    both = tally.look([known, of("b", memory_bytes=6, device_memory_bytes=0)])
    assert (both.memory_bytes, both.device_memory_bytes) == (11, 7)
    assert tally.look([known, of("b", memory_bytes=6)]).device_memory_bytes is None


def test_a_replica_that_goes_leaves_its_counters_and_takes_the_rest_along() -> None:
    tally = Tally("f")
    tally.look([of("a"), of("b")])
    found = tally.look([of("b")])
    assert (found.load.generated_tokens, found.load.running, found.load.slots) == (16, 1, 8)
    late = tally.look([of("a", replace(LOAD, generated_tokens=10)), of("b")])  # it had only been slow
    assert late.load.generated_tokens == 18


@given(st.lists(st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 9), max_size=4), max_size=20))
def test_counters_never_go_back(looks: list[dict[str, int]]) -> None:
    tally, counted, before = Tally("f"), dict[str, int](), 0
    most, module._MOST_REMEMBERED = module._MOST_REMEMBERED, 3  # type: ignore[misc]
    try:
        for look in looks:
            for name, more in look.items():
                counted[name] = counted.get(name, 0) + more
            found = tally.look([of(name, replace(LOAD, generated_tokens=counted[name])) for name in look])
            assert found.load.generated_tokens >= before
            before = found.load.generated_tokens
    finally:
        module._MOST_REMEMBERED = most  # type: ignore[misc]


def test_the_driver_is_asked_again_after_half_a_minute() -> None:
    asked: list[int] = []

    class Nvml:
        def nvmlInit_v2(self) -> int:  # noqa: N802 - the library's name
            asked.append(1)
            return 1

    now = 0.0
    memory = ProcessMemory(lambda: now, Nvml())
    assert memory.device_bytes() is None
    assert memory.device_bytes() is None
    assert len(asked) == 1
    now = INTERVAL_S
    memory.device_bytes()
    assert len(asked) == 2
    assert memory.resident_bytes() > 2**20
