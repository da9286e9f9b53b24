"""How slots, memory and cores are shared among lanes and stages, and choices that cannot be."""

from __future__ import annotations

import pytest

from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.config import SessionConfig, StageChoice
from llorch_serve.errors import UsageError
from llorch_serve.providers import Placement, ProviderChoice, ProviderShare, averaged
from llorch_serve.stages.checks import check_choice, device_option
from llorch_serve.stages.plan import lane_count, share_cores, shares, split_capacity


@pytest.mark.parametrize(
    ("choice", "stages", "slots", "lanes"),
    [
        (StageChoice(), 3, 8, 1),  # one process on one device: stages take turns
        (StageChoice(processes=True), 3, 8, 3),
        (StageChoice(processes=True), 3, 2, 2),
        (StageChoice((0, 1, 2)), 3, 8, 3),
        (StageChoice((0, 0, 1)), 3, 8, 2),
        (StageChoice((0, 0), processes=True), 2, 8, 2),
        (StageChoice(lanes=4), 2, 8, 4),
        (StageChoice(processes=True, lanes=1), 2, 8, 1),
    ],
)
def test_there_are_as_many_lanes_as_places_that_work_at_once(
    choice: StageChoice, stages: int, slots: int, lanes: int
) -> None:
    assert lane_count(choice, stages=stages, slots=slots) == lanes


def test_stages_apart_have_a_lane_each() -> None:
    assert lane_count(StageChoice(), stages=3, slots=8, apart=True) == 3
    assert lane_count(StageChoice(), stages=3, slots=2, apart=True) == 2


def capacity(slots: int, context: int, budget: int) -> KvCapacity:
    return KvCapacity(slots, context, bytes_per_token=10, budget=budget)


@pytest.mark.parametrize(
    ("total", "lanes", "slots", "budgets"),
    [
        (capacity(8, 100, 800), 2, [4, 4], [400, 400]),
        (capacity(8, 100, 800), 3, [3, 3, 2], [300, 300, 200]),
        (capacity(8, 100, 250), 2, [4, 4], [125, 125]),
        (capacity(8, 100, 250), 3, [4, 4], [125, 125]),  # a third could not hold a whole sequence
        (capacity(8, 100, 120), 2, [8], [120]),
        (capacity(3, 100, 300), 3, [1, 1, 1], [100, 100, 100]),
    ],
)
def test_every_lane_can_hold_a_sequence_of_full_length(
    total: KvCapacity, lanes: int, slots: list[int], budgets: list[int]
) -> None:
    found = split_capacity(total, lanes)
    assert [each.slots for each in found] == slots
    assert [each.budget for each in found] == budgets
    assert all(each.context == total.context for each in found)
    assert sum(each.budget for each in found) <= total.budget


def test_cores_are_shared_out_to_neighbours() -> None:
    assert share_cores([0, 1, 4, 5, 6], 2) == [(0, 1, 4), (5, 6)]
    assert share_cores([3], 2) == [(3,), (3,)]
    assert shares(7, 3) == [3, 2, 2]


@pytest.mark.parametrize("name", ["cpu", "openvino", None])
def test_devices_are_refused_where_there_are_none_to_choose(name: str | None) -> None:
    config = SessionConfig(provider=ProviderChoice(name), stages=StageChoice((0, 1)))
    with pytest.raises(UsageError, match=r"several devices \(cuda, .*has one; leave it out"):
        check_choice(config, 2)


def test_devices_are_one_for_each_stage() -> None:
    config = SessionConfig(provider=ProviderChoice("cuda"), stages=StageChoice((0, 1)))
    check_choice(config, 2)
    with pytest.raises(UsageError, match=r"names 2 devices and the artifact has 3 stages; .* like 0,1,2"):
        check_choice(config, 3)
    twice = SessionConfig(provider=ProviderChoice("cuda", ("device_id=1",)), stages=StageChoice((0, 1)))
    with pytest.raises(UsageError, match="device_id and --stage-device both name devices"):
        check_choice(twice, 2)
    assert device_option("webgpu") == "deviceId"


def test_processes_are_refused_where_they_inherit_no_sockets() -> None:
    config = SessionConfig(stages=StageChoice(processes=True))
    check_choice(config, 2, platform="linux")
    with pytest.raises(UsageError, match=r"--stage-processes .* Windows .* leave it out"):
        check_choice(config, 2, platform="win32")


def test_the_places_of_stages_are_told_as_one() -> None:
    def place(device: str, own: float) -> Placement:
        found = (ProviderShare("A", own, own), ProviderShare("B", 1 - own, 1 - own))
        return Placement("A", own, found, device)

    found = averaged([place("cuda:0", 1.0), place("cuda:1", 0.5)])
    assert found == Placement(
        "A", 0.75, (ProviderShare("A", 0.75, 0.75), ProviderShare("B", 0.25, 0.25)), "cuda:0, cuda:1"
    )
    assert averaged([place("cpu", 1.0), place("cpu", 1.0)]).device == "cpu"
