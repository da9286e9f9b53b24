"""The measurement of what gRPC and HTTP cost, once in short, and that its judgement can fail. No time is
judged here.
"""

from __future__ import annotations

import copy

import pytest

from measure.serving_cost import ASKED, STREAMS, WAYS, Costs, measure, missed, table


def test_every_way_and_wait_is_measured_once_a_round(long):
    costs = Costs()
    measure(long, costs, rounds=2, times=1, answer=8)
    measure(long, costs, rounds=1, times=2, answer=8)
    assert set(costs.speeds) == {f"{way}, {n}" for way in WAYS for n in STREAMS}
    assert set(costs.waits) == {
        f"{what}, {way}" for what in ("first token", "cancel to free slot") for way in ("gRPC", "HTTP")
    }
    assert all(
        len(found) == 3 and min(found) > 0 for found in (*costs.speeds.values(), *costs.waits.values())
    )


GOOD = Costs(
    speeds={f"{way}, {n}": [100.0, 50.0, 100.0] for way in WAYS for n in STREAMS},
    waits={"first token, gRPC": [5.0, 300.0, 6.0]},
)


@pytest.mark.parametrize(("way", "streams"), ASKED)
def test_a_ratio_below_what_is_asked_is_told(way, streams):
    assert missed(GOOD) == []
    costs = copy.deepcopy(GOOD)
    asked = ASKED[way, streams]
    costs.speeds[f"{way}, {streams}"] = [100 * (asked - 0.02), 50 * 1.0, 100 * (asked + 0.01)]
    assert missed(costs) == []  # the last round is the median
    costs.speeds[f"{way}, {streams}"][2] = 100 * (asked - 0.01)
    assert missed(costs) == [f"{way} at {streams}"]
    assert f"{asked - 0.01:.3f} ({asked - 0.02:.3f} to 1.000)" in table(costs)


def test_a_long_wait_is_told():
    costs = copy.deepcopy(GOOD)
    costs.waits["first token, gRPC"][0] = 100.0
    assert missed(costs) == ["first token, gRPC"]
