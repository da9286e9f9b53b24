"""The load of ``ci/soak`` in short, counted rather than timed, and that its judgement can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from measure.soak import CLIENTS, QUEUE, SLOTS, Soaked, judge, load, table
from measure.soak_clients import CYCLE, Seen, Work
from measure.watching import Footprint, Watched
from support.harness.processes import serving

REQUESTS = 4 * CLIENTS


def test_more_clients_than_slots_and_queue_get_answers_or_resource_exhausted(tiny):
    with serving(tiny, "--slots", SLOTS, "--max-queued-requests", QUEUE) as worker:
        _, _, seen, watched, before, after = load(worker, Work(512, 100, 27), requests=REQUESTS)
    assert (seen.answers, seen.failures) == (REQUESTS, {})
    assert seen.refused > 0
    assert sum(seen.tokens) == sum(Work(512, 100, 27).request(i).sampling.max_tokens for i in range(REQUESTS))
    assert watched.unwell == []
    assert watched.kept_ms
    assert watched.new_ms
    assert after.within(before), (before, after)


def test_a_cycle_has_every_length_once():
    work = Work(512, 128, 64)
    shapes = [
        (len(request.prompt.token_ids), request.sampling.max_tokens)
        for request in (work.request(index) for index in range(2 * CYCLE))
    ]
    assert shapes[:CYCLE] == shapes[CYCLE:]
    for lengths, longest in zip(zip(*shapes, strict=True), (128, 64), strict=True):
        assert (min(lengths), max(lengths)) == (round(longest * 8 ** (1 / CYCLE - 1)), longest)
    assert work.request(1).prompt != work.request(1 + CYCLE).prompt


GOOD = Soaked(
    since=10.0,
    until=110.0,
    seen=Seen(begun=0.0, tokens=[100] * 120, answers=500, refused=3),
    watched=Watched([(float(at), 2**28) for at in range(10, 111)], [1.0] * 100, [2.0] * 100),
    before=Footprint(10, 10),
    after=Footprint(11, 12),
    alone=(104.0, 102.0),
)


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        (0, {"seen": replace(GOOD.seen, failures={"INTERNAL: internal error": 1})}),
        (0, {"seen": replace(GOOD.seen, answers=0)}),
        (1, {"watched": replace(GOOD.watched, unwell=["NOT_SERVING"])}),
        (2, {"watched": replace(GOOD.watched, kept_ms=[1.0] * 98 + [60.0] * 2)}),
        (3, {"watched": replace(GOOD.watched, new_ms=[1.0] * 98 + [60.0] * 2)}),
        (4, {"watched": replace(GOOD.watched, memory=[*GOOD.watched.memory, (80.5, 2**28 + 9 * 2**20)])}),
        (
            4,
            {
                "watched": replace(
                    GOOD.watched,
                    memory=[
                        (at, size + (9 * 2**20) * (at > 30 or at < 20)) for at, size in GOOD.watched.memory
                    ],
                )
            },
        ),
        (5, {"alone": (106.0, 106.0)}),
        (6, {"after": Footprint(10, 15)}),
        (6, {"after": Footprint(15, 10)}),
    ],
)
def test_every_check_can_fail_and_fails_alone(line, changes):
    assert all(check.holds for check in judge(GOOD))
    checks = judge(replace(GOOD, **changes))
    assert [number for number, check in enumerate(checks) if not check.holds] == [line]
    assert table(checks).count("FAILS") == 1
