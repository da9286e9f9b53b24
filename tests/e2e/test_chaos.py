"""Every attack of ``ci/soak --chaos`` in short, on a tiny model: nothing is lost, and a loss would be
told.
"""

from __future__ import annotations

import math

import pytest

from measure.chaos import table
from measure.chaos_attacks import ATTACKS
from measure.chaos_ends import ENDS
from measure.chaos_field import Row, Sizes, field_of
from measure.chaos_strangers import STRANGERS

SMALL = Sizes(long_prompt=8_000, answer=400, endless=150_000, health_ms=math.inf, attack_s=0.0)


def test_clients_that_die_stall_or_send_anything_leave_nothing_behind(long):
    with field_of(long, SMALL) as ground:
        rows = [attack(ground, 2) for attack in ATTACKS]
        assert ground.answers > len(rows)
    assert [row.lost for row in rows] == [[]] * len(rows), table(rows)
    assert all(row.times >= 2 for row in rows)


@pytest.mark.parametrize("end", [*ENDS, *STRANGERS])
def test_an_end_under_load_keeps_what_was_promised(long, end):
    row = end(long, SMALL)
    assert row.lost == [], row.saw


def test_what_is_lost_is_told(long):
    with field_of(long, SMALL) as ground:
        ground.alone[3] += 1
        row = Row("none")
        with ground.attack(row):
            pass
        assert row.lost == ["a neighbour's answer was another one", "the answer afterwards was another one"]
        assert "another one; the answer" in table([row])
