"""One step of generation at a time: schedule, run, sample, update. Synchronous; everything it needs is
injected.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Final

from llorch_serve.engine.load import Load, TokenRate
from llorch_serve.engine.plan import StepPlan
from llorch_serve.engine.runner import Logits, Session, apply_edit, run
from llorch_serve.engine.scheduler import Sampled, Scheduler
from llorch_serve.engine.sequence import Sequence, SequenceStatus, TokenEvent
from llorch_serve.errors import NonFiniteLogitsError, ProviderError, ResourceError
from llorch_serve.sampling.logprobs import TokenScores, score_token
from llorch_serve.sampling.sampler import SamplingRow, sample_batch, sample_draft
from llorch_serve.structured.constraint import MaskThread

_FAILED_CALLS: Final = (ProviderError, ResourceError, NonFiniteLogitsError, MemoryError)
"""What a session raises where a call of it, not the engine, has failed."""


class Engine:
    """Owns a session, a scheduler and the sampling state of every live sequence. Not thread-safe."""

    def __init__(
        self, session: Session, scheduler: Scheduler, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._session = session
        self._scheduler = scheduler
        self._clock = clock
        self._rows: dict[Sequence, SamplingRow] = {}
        self._masks = MaskThread()
        self._rate = TokenRate()

    def add(self, *entries: tuple[Sequence, SamplingRow]) -> None:
        """Queue sequences, each with its sampling state, all or none. Raises QueueFullError."""
        self._scheduler.add(*(sequence for sequence, _ in entries))
        self._rows.update(entries)

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence; its slot is free for the next step. Does nothing if it has ended."""
        if self._rows.pop(sequence, None) is not None:
            self._scheduler.remove(sequence)

    def step(self) -> list[TokenEvent]:
        """Run one model call and return its tokens; an empty list if nothing was due or no token resulted.

        A model call that fails, for want of memory too, or a prompt that cannot be scored ends the sequences
        of this step with that error, and no others; a failure while one sequence's token is chosen or scored
        ends that one. Where slots cannot be edited, the sequences whose slots were to change end, and the
        model is not called.
        """
        plan = self._scheduler.schedule()
        if plan is None:
            return []
        self._stamp_start(plan)
        for place, edit in enumerate(plan.edits):
            try:
                apply_edit(self._session, edit)
            except _FAILED_CALLS as error:
                return self._fail(self._scheduler.lose(plan.edits[place:]), error)
        try:
            logits = run(self._session, plan)
        except _FAILED_CALLS as error:
            return self._fail(plan.computed(), error)
        results = self._sample(plan, logits)
        scores = _score(plan, results, logits)
        events = self._with_scores(self._scheduler.update(plan, results), scores)
        now = self._clock()
        self._rate.count(now, sum(event.token_id is not None for event in events))
        for event in events:
            sequence = event.sequence
            if sequence.first_token_at is None:
                sequence.first_token_at = now
            sequence.last_token_at = now
            if sequence.status is SequenceStatus.FINISHED:
                self._rows.pop(sequence, None)
        return events

    def close(self) -> None:
        """End the thread of masks."""
        self._masks.close()

    def load(self) -> Load:
        """Return how busy the engine is; from any thread, as of the last step."""
        return replace(self._scheduler.load(), tokens_per_second=self._rate.per_second(self._clock()))

    def _sample(self, plan: StepPlan, logits: Logits) -> list[Sampled]:
        """Choose the tokens of every sequence of the step, and count them in its sampling state."""
        sequences = plan.sampled()
        rows = [self._rows[sequence] for sequence in sequences]
        if plan.verify is not None:
            results: list[Sampled] = [_sample_check(logits, rows[0], plan.verify.draft)]
        else:
            results = _sample_each(logits, rows)
        self._look_ahead(sequences, rows, results)
        return results

    @staticmethod
    def _with_scores(events: list[TokenEvent], scores: dict[Sequence, list[TokenScores]]) -> list[TokenEvent]:
        """Return the events with the log-probabilities of their tokens; a sequence may end before its last
        one.
        """
        if not scores:
            return events
        told = []
        for event in events:
            if event.token_id is not None and event.sequence in scores:
                event = replace(event, scores=scores[event.sequence].pop(0))
            told.append(event)
        return told

    def _look_ahead(self, sequences: list[Sequence], rows: list[SamplingRow], results: list[Sampled]) -> None:
        """Begin the masks of the next step, and tell sequences whose grammar needs none."""
        constraints = []
        for sequence, row, result in zip(sequences, rows, results, strict=True):
            if row.constraint is None or isinstance(result, Exception):
                continue
            if row.constraint.complete:
                sequence.complete_at = row.generated
            else:
                constraints.append(row.constraint)
        if constraints:
            self._masks.start(constraints)

    def _stamp_start(self, plan: StepPlan) -> None:
        begun = plan.prefill or plan.start
        if begun is not None and begun.sequence.started_at is None:
            begun.sequence.started_at = self._clock()

    def _fail(self, failed: list[Sequence], error: Exception) -> list[TokenEvent]:
        for sequence in failed:
            del self._rows[sequence]
            self._scheduler.remove(sequence, keep_cache=False)
        return [TokenEvent(sequence, None, error=error) for sequence in failed]


def _score(plan: StepPlan, results: list[Sampled], logits: Logits) -> dict[Sequence, list[TokenScores]]:
    """Return the log-probabilities of the tokens of every sequence that asks for them, as the model gave
    them.

    A sequence for which that fails gets the error in ``results``.
    """
    scores = {}
    for row, (sequence, tokens) in enumerate(zip(plan.sampled(), results, strict=True)):
        if sequence.logprobs is None or isinstance(tokens, Exception):
            continue
        try:
            # A check has a row of logits for each of its tokens, any other step one for each sequence.
            scores[sequence] = [
                score_token(logits[row + i], token, top=sequence.logprobs) for i, token in enumerate(tokens)
            ]
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this sequence's own
            results[row] = error
    return scores


def _sample_check(logits: Logits, row: SamplingRow, draft: Seq[int]) -> Sampled:
    """Choose the tokens of a sequence whose guesses were checked; none if its grammar lets nothing follow."""
    try:
        return () if row.ended else sample_draft(logits, row, draft)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this sequence's own
        return error


def _sample_each(logits: Logits, rows: list[SamplingRow]) -> list[Sampled]:
    """Choose one token of every row whose grammar, if it has one, lets something follow."""
    results: list[Sampled] = []
    going_on = []
    for index, row in enumerate(rows):
        try:
            ended = row.ended
        except Exception as error:  # noqa: BLE001 - it is this row's own, and told to its caller
            results.append(error)
            continue
        results.append(())
        if not ended:
            going_on.append(index)
    if len(going_on) < len(rows):
        logits = logits[going_on]
    chosen = _choose(logits, [rows[index] for index in going_on])
    for index, token in zip(going_on, chosen, strict=True):
        results[index] = token if isinstance(token, Exception) else _counted(rows[index], token)
    return results


def _counted(row: SamplingRow, token: int) -> Sampled:
    """Count a chosen token in its row's state, and return it as a result."""
    try:
        row.append(token)
    except Exception as error:  # noqa: BLE001 - as above
        return error
    return (token,)


def _choose(logits: Logits, rows: Seq[SamplingRow]) -> list[int | Exception]:
    """Choose every row's token; one whose choice fails, for whatever reason, gets the error and its
    neighbours do not.
    """
    try:
        return [*sample_batch(logits, rows)]
    except Exception:  # noqa: BLE001 - which row it was shows when each is on its own
        chosen: list[int | Exception] = []
        for values, row in zip(logits, rows, strict=True):
            try:
                chosen += sample_batch(values[None], [row])
            except Exception as error:  # noqa: BLE001 - it is this row's own, and told to its caller
                chosen.append(error)
        return chosen
