"""Whose turn it is, and with which token a sequence ends."""

from __future__ import annotations

import pytest

from llorch_serve.engine.scheduler import finish_reason
from llorch_serve.engine.sequence import FinishReason, Sequence
from llorch_serve.engine.turn import NEW_TURN, Turn
from support.fakes.session import sequence_of


def named(*names: str) -> list[Sequence]:
    return [sequence_of(name, (1, 2), 3) for name in names]


def test_a_turn_goes_on_while_a_running_sequence_was_not_checked() -> None:
    first, second, ended = named("first", "second", "ended")
    turn = Turn(prompt_ran=True, checked=frozenset((first, ended)))
    assert turn.among([first, second]) == Turn(prompt_ran=True, checked=frozenset((first,)))


def test_a_turn_ends_when_every_running_sequence_was_checked() -> None:
    first, ended = named("first", "ended")
    assert Turn(prompt_ran=True, checked=frozenset((first, ended))).among([first]) is NEW_TURN
    assert Turn(prompt_ran=True, checked=frozenset((ended,))).among([]) is NEW_TURN


@pytest.mark.parametrize(
    ("token", "complete", "generated", "reason"),
    [
        (5, False, 0, None),
        (5, False, 2, FinishReason.LENGTH),
        (5, True, 0, FinishReason.STOP),
        (5, True, 2, FinishReason.STOP),
        (9, False, 0, FinishReason.STOP),
        (9, False, 2, FinishReason.STOP),
        (None, True, 1, FinishReason.STOP),
        (None, False, 0, None),
    ],
)
def test_a_sequence_ends_at_a_stop_token_a_grammars_end_or_its_length(
    token: int | None, complete: bool, generated: int, reason: FinishReason | None
) -> None:
    sequence = sequence_of("r", (1, 2), 3, stop_ids=(9,))
    sequence.token_ids += [7] * generated
    assert finish_reason(sequence, token, complete=complete) is reason


def test_a_sequence_of_which_only_the_prompt_is_wanted_ends_when_that_is_computed() -> None:
    sequence = sequence_of("r", (1, 2), 0)
    sequence.cache.computed = 1
    assert finish_reason(sequence, None, complete=False) is None
    sequence.cache.computed = 2
    assert finish_reason(sequence, None, complete=False) is FinishReason.LENGTH
