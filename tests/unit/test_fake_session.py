"""The fake session notices what it is there to notice; else the tests built on it would prove nothing."""

from __future__ import annotations

import numpy as np

from support.fakes.session import FakeSession, continuation, next_logits

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def test_chunks_and_single_tokens_equal_the_oracle() -> None:
    session = FakeSession()
    assert session.prefill(1, PROMPT[:3], 0, ()).shape == (0, session.vocab_size)
    np.testing.assert_array_equal(session.prefill(1, PROMPT[3:], 3)[0], next_logits(PROMPT, 32))
    session.prefill(0, (7,), 0)
    logits = session.decode([8, 11], [2, len(PROMPT) + 1])
    np.testing.assert_array_equal(logits[0], next_logits((7, 8), 32))
    np.testing.assert_array_equal(logits[1], next_logits((*PROMPT, 11), 32))


def test_wanted_rows_are_those_asked_for() -> None:
    logits = FakeSession().prefill(0, PROMPT, 0, (4, 0))
    np.testing.assert_array_equal(logits, [next_logits(PROMPT[:5], 32), next_logits(PROMPT[:1], 32)])


def test_a_lost_token_changes_the_answer() -> None:
    session = FakeSession()
    session.prefill(0, PROMPT[:3], 0)
    assert (session.prefill(0, PROMPT[4:], 3)[0] != next_logits(PROMPT, 32)).any()


def test_a_wrong_position_changes_the_answer() -> None:
    session = FakeSession()
    session.prefill(0, PROMPT[:4], 0)
    assert (session.prefill(0, PROMPT[4:], 5)[0] != next_logits(PROMPT, 32)).any()


def test_another_sequences_slot_changes_the_answer() -> None:
    session = FakeSession()
    session.prefill(0, (9, 9, 9, 9), 0)
    session.prefill(1, PROMPT[:4], 0)
    assert (session.prefill(0, PROMPT[4:], 4)[0] != next_logits(PROMPT, 32)).any()


def test_only_a_whole_move_keeps_the_answer() -> None:
    session = FakeSession()
    session.prefill(2, PROMPT, 0)
    session.copy_slot(2, 0, len(PROMPT))
    session.copy_slot(2, 1, len(PROMPT) - 1)
    logits = session.decode([7, 7], [len(PROMPT) + 1] * 2)
    np.testing.assert_array_equal(logits[0], next_logits((*PROMPT, 7), 32))
    assert (logits[1] != logits[0]).any()


def test_answers_differ_between_prompts_and_vary_within_one() -> None:
    first, second = continuation(PROMPT, 20, 32), continuation(PROMPT[1:], 20, 32)
    assert first != second
    assert len(set(first)) > 5
