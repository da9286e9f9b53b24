"""Places that lines of batches share: as many as answers, in the order of asking, and none lost."""

from __future__ import annotations

import asyncio
import json
import random
import tracemalloc

import pytest

from llorch_serve.http.batches.places import Places, answers_of
from support.fakes.generator import PATIENCE_S


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        ({"messages": []}, 1),
        ({"n": 3}, 3),
        ({"n": 2, "best_of": 5}, 5),
        ({"prompt": "Hi", "n": None}, 1),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": []}, 1),
        ({"context": "a", "continuations": ["b", [1], "c"]}, 3),
        ({"query": "a", "documents": ["b", {"text": "c"}]}, 4),  # each is scored as relevant and as not
        ({"documents": []}, 1),
        ({"n": "many"}, 1),
        ({"n": -4}, 1),
    ],
)
def test_a_line_counts_as_the_answers_that_it_asks_for(body, answers):
    assert answers_of(json.dumps(body).encode()) == answers


def test_what_is_no_body_counts_as_one():
    assert answers_of(b"") == answers_of(b"[") == answers_of(b"\xff") == 1


@pytest.mark.parametrize("name", ["prompt", "continuations", "documents"])
def test_a_long_list_takes_all_places_and_is_not_read_on_the_loop(name):
    raw = b'{"%s": [%s""]}' % (name.encode(), b'"",' * 2**20)
    tracemalloc.start()
    try:
        assert answers_of(raw) > 1000
        assert tracemalloc.get_traced_memory()[1] < 2 * len(raw)
    finally:
        tracemalloc.stop()
    assert answers_of(json.dumps({"prompt": [1] * 2**20}).encode()) == 1


def test_no_more_places_are_taken_than_there_are_and_turns_keep_their_order():
    async def served():
        places, order, inside = Places(3), [], 0

        async def line(number, count):
            nonlocal inside
            async with places.taken(count):
                order.append(number)
                inside += min(count, 3)
                assert inside <= 3
                await asyncio.sleep(0)
                inside -= min(count, 3)

        async with asyncio.TaskGroup() as tasks:
            for number, count in enumerate((1, 2, 3, 1, 9, 1, 1, 1, 2)):
                tasks.create_task(line(number, count))
        assert order == list(range(9))

    asyncio.run(served())


def test_places_of_those_who_leave_come_back_whenever_they_leave():
    async def served():
        draw = random.Random(5)
        places = Places(4)

        async def line(count):
            async with places.taken(count):
                for _ in range(draw.randrange(4)):
                    await asyncio.sleep(0)

        for _ in range(300):
            tasks = [asyncio.ensure_future(line(draw.randint(1, 6))) for _ in range(6)]
            for task in draw.sample(tasks, 4):
                for _ in range(draw.randrange(3)):
                    await asyncio.sleep(0)
                task.cancel()
            done, _ = await asyncio.wait(tasks, timeout=PATIENCE_S)
            assert len(done) == len(tasks)
            async with asyncio.timeout(PATIENCE_S), places.taken(4):
                assert places._left == 0
            assert places._left == 4

    asyncio.run(served())
