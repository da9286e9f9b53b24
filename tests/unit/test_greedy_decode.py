"""Batches whose tokens the session chooses: only where nobody needs logits, and with the tokens that the
sampler would have chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llorch_serve.engine.capabilities import FULL
from llorch_serve.errors import NonFiniteLogitsError
from llorch_serve.sampling.drawable import DrawableIds
from support.fakes.session import FakeSession, continuation, sequence_of
from support.harness.engine_run import answers, run_all


@dataclass(slots=True)
class GreedyFake(FakeSession):
    """A fake that chooses tokens. chosen, fetched: of each step that it did so for, how many rows there were
    and whose logits were asked for; instead: changes the ids.
    """

    chosen: list[int] = field(default_factory=list)
    fetched: list[tuple[int, ...]] = field(default_factory=list)
    instead: Callable[[npt.NDArray[np.int64]], None] = lambda _ids: None
    last: npt.NDArray[np.float32] | None = None

    def decode_greedy(self, token_ids: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[np.int64]:
        self.last = self.decode(token_ids, lengths)
        ids = self.last.argmax(axis=1)
        self.chosen.append(len(ids))
        self.fetched.append(())
        self.instead(ids)
        return ids

    def step_logits(self, rows: Sequence[int]) -> npt.NDArray[np.float32]:
        assert rows
        assert self.last is not None
        self.fetched[-1] = tuple(rows)
        return self.last[list(rows)]


def greedy_fake(**settings: Any) -> GreedyFake:
    return GreedyFake(capabilities=replace(FULL, greedy_decode=True), **settings)


def test_greedy_answers_are_chosen_by_the_session_and_are_the_samplers() -> None:
    session = greedy_fake()
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    sequences = [sequence_of(str(prompt), prompt, 6) for prompt in prompts]
    assert not run_all(session, sequences)
    assert answers(sequences) == [continuation(prompt, 6, 32) for prompt in prompts]
    assert sum(session.chosen) == 3 * 5, "all but the first tokens"
    assert sum(call.kind == "decode" for call in session.calls) == len(session.chosen)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7, "seed": 3},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0},
        {"logit_bias": {3: 5.0}},
        {"min_tokens": 6, "stop_ids": (1,)},
    ],
)
def test_of_a_mixed_batch_only_the_logits_that_are_needed_are_fetched(params: dict[str, Any]) -> None:
    session = greedy_fake()
    plain, other = sequence_of("plain", [1, 2, 3], 9), sequence_of("other", [4, 5], 6, **params)
    assert not run_all(session, [plain, other])
    alone, together = (1, ()), (2, (1,))
    assert list(zip(session.chosen, session.fetched, strict=True)) == [alone, *5 * [together], *2 * [alone]]
    without = FakeSession()
    again = [sequence_of("plain", [1, 2, 3], 9), sequence_of("other", [4, 5], 6, **params)]
    run_all(without, again)
    assert answers([plain, other]) == answers(again)


def test_where_all_need_logits_the_session_is_not_asked_to_choose() -> None:
    session = greedy_fake()
    sequences = [sequence_of(str(seed), [1, 2, seed], 6, temperature=1.0, seed=seed) for seed in (3, 4)]
    assert not run_all(session, sequences)
    assert not session.chosen


def test_log_probabilities_need_logits() -> None:
    session, sequence = greedy_fake(), sequence_of("one", [1, 2], 4)
    sequence.logprobs = 0
    assert not run_all(session, [sequence])
    assert not session.chosen


def test_tokens_told_before_are_no_choice() -> None:
    session, sequence = greedy_fake(), sequence_of("one", [1, 2], 4)
    assert sequence.sampling is not None
    sequence.sampling.forced = (5, 6)
    assert not run_all(session, [sequence])
    assert answers([sequence])[0][:2] == [5, 6]
    assert session.chosen == [1, 1]


def test_a_session_that_cannot_choose_is_not_asked_to() -> None:
    session = GreedyFake()
    run_all(session, [sequence_of("one", [1, 2], 4)])
    assert not session.chosen


def test_a_token_that_stands_for_nothing_is_left_to_the_sampler() -> None:
    session, sequence = greedy_fake(), sequence_of("one", [1, 2, 3], 6)
    free = continuation([1, 2, 3], 6, 32)
    drawable = DrawableIds.of(32, {free[2]}, vocab_size=32)
    assert sequence.sampling is not None
    sequence.sampling.drawable = drawable
    assert not run_all(session, [sequence])
    (found,) = answers([sequence])
    assert found[:2] == free[:2]
    assert free[2] not in found
    assert (0,) in session.fetched, "of that row the logits were looked at"
    assert sum(call.kind == "decode" for call in session.calls) == 5


def test_logits_that_are_not_finite_end_their_sequence_alone() -> None:
    session = greedy_fake(slots=4)

    def spoil(call: Any, logits: npt.NDArray[np.float32]) -> None:
        if call.kind == "decode" and len(call.slots) == 2 and len(call.tokens[0]) > 5:
            logits[0, 7] = np.nan

    def none_of_it(ids: npt.NDArray[np.int64]) -> None:
        if len(ids) == 2 and len(session.calls[-1].tokens[0]) > 5:
            ids[0] = -1

    session.edit, session.instead = spoil, none_of_it
    first, second = sequence_of("first", [1, 2, 3], 8), sequence_of("second", [4, 5], 8)
    (error,) = run_all(session, [first, second])
    assert isinstance(error, NonFiniteLogitsError)
    assert answers([second]) == [continuation([4, 5], 8, 32)]
    assert 0 < len(answers([first])[0]) < 8
