"""The waiting queue's order under priorities, and its bounds."""

from __future__ import annotations

import pytest

from llorch_serve.config import EngineConfig
from llorch_serve.engine.sequence import Ownership, Sequence
from llorch_serve.engine.waiting import DEFAULT_MOST_TOKENS, PRIORITY_TOKENS, WaitingQueue
from llorch_serve.errors import QueueFullError
from support.fakes.session import sequence_of


def waiting(name: str, client: str = "a", priority: int = 0, tokens: int = 1) -> Sequence:
    return sequence_of(name, (1,) * tokens, 4, ownership=Ownership(client, priority=priority))


def drain(queue: WaitingQueue, cost: int = 10) -> list[str]:
    """Start everything, each served ``cost`` tokens and staying live; return the order."""
    order = []
    while (sequence := queue.next()) is not None:
        queue.take(sequence)
        queue.charge(sequence, cost)
        order.append(sequence.request_id)
    return order


def test_one_clients_highest_priority_goes_first_and_equals_by_arrival() -> None:
    queue = WaitingQueue(10)
    for name, priority in (("a", 0), ("b", 3), ("c", -2), ("d", 3), ("e", 0)):
        queue.add(waiting(name, priority=priority))
    assert drain(queue) == ["b", "d", "a", "e", "c"]


def test_a_priority_goes_ahead_of_equals_and_shuts_nobody_out() -> None:
    queue = WaitingQueue(20)
    queue.add(waiting("low", client="patient"))
    for index in range(4):
        queue.add(waiting(f"high{index}", client="greedy", priority=1))
    # A head start of one step: two requests of 600 tokens, and the patient client is due.
    order = drain(queue, cost=600)
    assert PRIORITY_TOKENS == 1000
    assert order == ["high0", "high1", "low", "high2", "high3"]


def test_prompts_that_wait_are_bounded_by_their_tokens() -> None:
    queue = WaitingQueue(10, most_tokens=10)
    first = waiting("first", tokens=25)
    queue.add(first)  # alone it may always wait
    with pytest.raises(
        QueueFullError, match=r"25 tokens of prompts are waiting and this request has 1,.* is 10"
    ):
        queue.add(waiting("second"))
    queue.take(first)
    queue.add(waiting("third", tokens=6))
    queue.add(waiting("fourth", tokens=4))
    with pytest.raises(QueueFullError):
        queue.add(waiting("fifth", tokens=1))
    assert len(queue) == 2


def test_a_prompt_counts_once_for_each_answer_to_it_and_all_wait_or_none() -> None:
    queue = WaitingQueue(10, most_tokens=10)
    answers = [waiting(f"answer{index}", tokens=4) for index in range(3)]
    queue.add(*answers)  # alone a request may always wait, with all its answers
    for answer in answers:
        queue.take(answer)
    queue.add(waiting("third", tokens=1))
    with pytest.raises(QueueFullError, match="1 tokens of prompts are waiting and this request has 12"):
        queue.add(*answers)
    assert len(queue) == 1
    queue.add(*answers[:2])
    assert len(queue) == 3


def test_what_is_refused_leaves_no_client_behind() -> None:
    queue = WaitingQueue(10, most_tokens=1)
    queue.add(waiting("first"))
    with pytest.raises(QueueFullError):
        queue.add(waiting("second", client="b"))
    assert queue._clients.keys() == {"a"}


def test_prompts_that_wait_are_bounded_without_a_setting() -> None:
    """A full queue of the longest prompts of a model of 128 Ki tokens would hold gigabytes."""
    queue, long = WaitingQueue(EngineConfig().max_waiting), 2**17
    for index in range(DEFAULT_MOST_TOKENS // long):
        queue.add(waiting(f"long{index}", tokens=long))
    with pytest.raises(QueueFullError, match="the most this worker queues is 1048576"):
        queue.add(waiting("one more", tokens=long))


def test_one_prompt_of_any_length_waits_where_nothing_else_does() -> None:
    queue = WaitingQueue(10)
    queue.add(waiting("longest", tokens=DEFAULT_MOST_TOKENS + 1))
    with pytest.raises(QueueFullError):
        queue.add(waiting("next", tokens=1))
