"""Requests of a front on their way to a replica, and in it."""

from __future__ import annotations

import pytest

from llorch_serve.cluster.in_flight import LONGEST_S, MOST_ENDED, InFlight


def test_a_choice_counts_until_it_is_sent() -> None:
    flying = InFlight(lambda: 0.0)
    flying.chosen("a", "1")
    flying.chosen("a", "2")
    flying.chosen("b", "3")
    assert (flying.unsent()["a"], flying.unsent()["b"], flying.unsent()["c"]) == (2, 1, 0)
    flying.sent("a", "1")
    flying.sent("c", "4")  # chosen by nobody here: nothing to forget
    assert (flying.unsent()["a"], flying.unsent()["b"]) == (1, 1)


def test_a_request_that_is_sent_to_its_second_choice_counts_there_alone() -> None:
    flying = InFlight(lambda: 0.0)
    flying.chosen("a", "1")
    flying.chosen("b", "2")
    flying.sent("b", "1")
    assert (dict(flying.unsent()), dict(flying.on_the_way())) == ({"b": 1}, {"b": 1})


def test_an_end_that_is_told_late_is_still_that_of_what_was_sent() -> None:
    now = 0.0
    flying = InFlight(lambda: now)
    flying.sent("a", "1")
    now = 2 * LONGEST_S
    assert flying.on_the_way()["a"] == 0
    flying.ended("a", "1")
    flying.taken("a", "1")
    assert flying.count("a") == 0


def test_what_has_been_sent_counts_until_it_is_taken_or_has_ended() -> None:
    flying = InFlight(lambda: 0.0)
    for request in "123":
        flying.chosen("a", request)
        flying.sent("a", request)
    assert (flying.unsent()["a"], flying.on_the_way()["a"]) == (0, 3)
    flying.taken("a", "2")
    assert (flying.on_the_way()["a"], flying.count("a")) == (2, 1)
    flying.ended("a", "9")  # a question that every replica was asked
    flying.ended("b", "1")
    assert (flying.on_the_way()["a"], flying.count("a")) == (2, 1)
    flying.ended("a", "3")  # the replica had no room for it
    assert (flying.on_the_way()["a"], flying.count("a")) == (1, 1)


def test_what_was_sent_and_chosen_for_anew_is_no_longer_on_its_way() -> None:
    flying = InFlight(lambda: 0.0)
    flying.chosen("a", "1")
    flying.sent("a", "1")
    flying.chosen("b", "1")
    assert (flying.on_the_way()["a"], flying.unsent()["b"]) == (0, 1)


def test_an_answer_that_is_over_is_told_from_those_that_go_on() -> None:
    flying, over = InFlight(lambda: 0.0), set()
    for request in "123":
        flying.taken("a", request, lambda request=request: request in over)
    flying.taken("a", "unknown")
    assert (flying.count("a"), flying.over("a"), flying.over("b")) == (4, 0, 0)
    over.add("2")
    assert (flying.count("a"), flying.over("a")) == (4, 1)
    flying.ended("a", "2")
    assert (flying.count("a"), flying.over("a")) == (3, 0)


def test_a_request_that_is_chosen_for_anew_counts_once() -> None:
    flying = InFlight(lambda: 0.0)
    flying.chosen("a", "1")
    flying.chosen("b", "1")
    assert (flying.unsent()["a"], flying.unsent()["b"]) == (0, 1)


@pytest.mark.parametrize("sent", [False, True])
def test_a_request_that_was_given_up_is_forgotten(sent: bool) -> None:
    now = 0.0
    flying = InFlight(lambda: now)

    def begin(request: str) -> None:
        flying.chosen("a", request)
        if sent:
            flying.sent("a", request)

    counts = flying.on_the_way if sent else flying.unsent
    begin("1")
    now = LONGEST_S / 2
    begin("2")
    assert counts()["a"] == 2
    now = LONGEST_S
    assert counts()["a"] == 1


def test_what_a_replica_has_taken_counts_until_it_ends_however_long_that_takes() -> None:
    now = 0.0
    flying = InFlight(lambda: now)
    flying.taken("a", "1")
    flying.taken("a", "2")
    now = 1000.0
    assert (flying.count("a"), flying.count("b")) == (2, 0)
    flying.ended("a", "1")
    flying.ended("a", "1")  # told of twice
    flying.ended("b", "2")  # which had refused it
    assert flying.count("a") == 1


def test_what_a_replica_had_is_forgotten_with_it() -> None:
    flying = InFlight(lambda: 0.0)
    flying.taken("a", "1")
    flying.keep({"a", "b"})
    assert flying.count("a") == 1
    flying.keep({"b"})
    assert flying.count("a") == 0


def test_a_request_that_ends_before_it_is_known_to_be_taken_is_not_counted_for_good():
    counts = InFlight(lambda: 0.0)
    counts.keep(["a", "b"])
    counts.chosen("a", "quick")
    counts.sent("a", "quick")
    counts.ended("a", "quick")
    counts.taken("a", "quick")
    assert counts.count("a") == 0
    # One that a replica has rejected is counted where it is taken then, were it the same one.
    for replica in "ab":
        counts.chosen("a", replica)
        counts.sent("a", replica)
        counts.ended("a", replica)
        counts.chosen(replica, replica)
        counts.taken(replica, replica)
        assert counts.count(replica) == 1


def test_what_has_ended_and_is_never_taken_is_forgotten():
    counts = InFlight(lambda: 0.0)
    for request in range(3 * MOST_ENDED):
        counts.sent("a", str(request))
        counts.ended("a", str(request))
    assert len(counts._ended) == MOST_ENDED
