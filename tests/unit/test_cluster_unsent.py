"""Requests that a replica has been chosen for and that have not been sent."""

from __future__ import annotations

from llorch_serve.cluster.unsent import LONGEST_S, Unsent


def test_a_choice_counts_until_it_is_sent() -> None:
    unsent = Unsent(lambda: 0.0)
    unsent.chosen("a", "1")
    unsent.chosen("a", "2")
    unsent.chosen("b", "3")
    assert (unsent.counts()["a"], unsent.counts()["b"], unsent.counts()["c"]) == (2, 1, 0)
    unsent.sent("a")
    unsent.sent("c")  # chosen by nobody here: nothing to forget
    assert (unsent.counts()["a"], unsent.counts()["b"]) == (1, 1)


def test_a_request_that_is_chosen_for_anew_counts_once() -> None:
    unsent = Unsent(lambda: 0.0)
    unsent.chosen("a", "1")
    unsent.chosen("b", "1")
    assert (unsent.counts()["a"], unsent.counts()["b"]) == (0, 1)


def test_a_request_that_was_given_up_is_forgotten() -> None:
    now = 0.0
    unsent = Unsent(lambda: now)
    unsent.chosen("a", "1")
    now = LONGEST_S / 2
    unsent.chosen("a", "2")
    assert unsent.counts()["a"] == 2
    now = LONGEST_S
    assert unsent.counts()["a"] == 1
