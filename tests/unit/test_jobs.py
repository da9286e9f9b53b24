"""A request's job takes the events of its own sequences, each up to its end, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llorch_serve.engine.sequence import FinishReason, Sequence, TokenEvent
from llorch_serve.requests import GenerationUpdate, UpdateSink
from llorch_serve.text.tokenizer import TextStream
from llorch_serve.worker.answers import Answer, Answers
from llorch_serve.worker.jobs import Job
from llorch_serve.worker.scores import Scores
from llorch_serve.worker.scoring import ScoredPair
from support.fakes.session import sequence_of
from support.harness.worker import TOKENIZER, Sink


def sequences(count: int) -> list[Sequence]:
    found = [sequence_of("r", (1, 2), 3) for _ in range(count)]
    for index, sequence in enumerate(found):
        sequence.index = index
    return found


def answers(count: int, sink: UpdateSink | None = None) -> Answers:
    members = [Answer(each, TextStream(TOKENIZER), TOKENIZER, seed=0) for each in sequences(count)]
    return Answers("r", sink or Sink(), tuple(members))


def scores(count: int) -> Scores:
    pairs = tuple(ScoredPair((1,), (2,)) for _ in range(count))
    return Scores("r", Sink(), pairs, tuple(sequences(count)), None, TOKENIZER)


@pytest.mark.parametrize("make", [answers, scores])
def test_an_event_of_an_earlier_request_with_the_same_id_tells_nothing(make: Callable[[int], Job]) -> None:
    job, earlier = make(1), sequences(3)
    for sequence in earlier:
        assert job.take(TokenEvent(sequence, None, FinishReason.LENGTH)) == ([], False)
    assert job.open == 1


@pytest.mark.parametrize("make", [answers, scores])
@pytest.mark.parametrize("late", [(5, None), (None, FinishReason.CANCELLED)])
def test_a_sequence_that_has_ended_tells_nothing_more(
    make: Callable[[int], Job], late: tuple[int | None, FinishReason | None]
) -> None:
    job = make(2)
    first, second = job.sequences
    (update,), _ = job.take(TokenEvent(first, None, FinishReason.LENGTH))
    assert (update.index, update.open_answers, update.is_last) == (0, 1, False)
    assert job.take(TokenEvent(first, *late)) == ([], False)
    (update,), _ = job.take(TokenEvent(second, None, FinishReason.CANCELLED))
    assert update.is_last
    assert job.open == 0


@pytest.mark.parametrize("make", [answers, scores])
def test_an_error_of_one_sequence_ends_the_request(make: Callable[[int], Job]) -> None:
    job, error = make(2), MemoryError("no memory")
    updates, stopped = job.take(TokenEvent(job.sequences[1], None, error=error))
    assert updates == [GenerationUpdate("r", "", (), error=error, index=1, open_answers=2)]
    assert updates[0].is_last
    assert (job.open, stopped) == (0, False)


def test_what_fails_while_the_best_answers_are_chosen_ends_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, error = answers(2), MemoryError("no memory")
    job.best = 1

    def fail(self: Answers, count: int) -> list[GenerationUpdate]:
        raise error

    monkeypatch.setattr(Answers, "_chosen", fail)
    first, second = job.sequences
    assert job.take(TokenEvent(first, None, FinishReason.LENGTH)) == ([], False)
    (update,), stopped = job.take(TokenEvent(second, None, FinishReason.LENGTH))
    assert (update.error, update.is_last, job.open, stopped) == (error, True, 0, False)
