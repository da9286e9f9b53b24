"""One step of generation at a time: schedule, run, sample, update. Synchronous; everything it needs is injected."""

from __future__ import annotations

import time
from collections.abc import Callable

from llorch_serve.errors import ProviderError
from llorch_serve.load import Load
from llorch_serve.plan import StepPlan
from llorch_serve.runner import Logits, Session, run
from llorch_serve.sampler import SamplingRow, sample_batch, sample_draft
from llorch_serve.scheduler import Sampled, Scheduler
from llorch_serve.sequence import Sequence, SequenceStatus, TokenEvent
from llorch_serve.structured.constraint import MaskThread


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

    def add(self, sequence: Sequence, row: SamplingRow) -> None:
        """Queue a sequence and its sampling state. Raises QueueFullError."""
        self._scheduler.add(sequence)
        self._rows[sequence] = row

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence; its slot is free for the next step. Does nothing if it has ended."""
        if self._rows.pop(sequence, None) is not None:
            self._scheduler.remove(sequence)

    def step(self) -> list[TokenEvent]:
        """Run one model call and return its tokens; an empty list if nothing was due or no token resulted.

        A failure of the runtime ends the sequences of this step with that error, and no others.
        """
        plan = self._scheduler.schedule()
        if plan is None:
            return []
        self._stamp_start(plan)
        try:
            logits = run(self._session, plan)
        except ProviderError as error:
            return self._fail(plan, error)
        events = self._scheduler.update(plan, self._sample(plan, logits))
        now = self._clock()
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
        return self._scheduler.load()

    def _sample(self, plan: StepPlan, logits: Logits) -> list[Sampled]:
        """Choose the tokens of every sequence of the step, and count them in its sampling state."""
        sequences = plan.sampled()
        rows = [self._rows[sequence] for sequence in sequences]
        if plan.verify is not None:
            results: list[Sampled] = [
                () if rows[0].ended else sample_draft(logits, rows[0], plan.verify.draft)
            ]
        else:
            results = _sample_each(logits, rows)
        self._look_ahead(sequences, rows)
        return results

    def _look_ahead(self, sequences: list[Sequence], rows: list[SamplingRow]) -> None:
        """Begin the masks of the next step, and tell sequences whose grammar needs none."""
        constraints = []
        for sequence, row in zip(sequences, rows, strict=True):
            if row.constraint is None:
                continue
            if row.constraint.complete:
                sequence.complete_at = row.generated
            else:
                constraints.append(row.constraint)
        if constraints:
            self._masks.start(constraints)

    def _stamp_start(self, plan: StepPlan) -> None:
        if plan.prefill is not None and plan.prefill.sequence.started_at is None:
            plan.prefill.sequence.started_at = self._clock()

    def _fail(self, plan: StepPlan, error: ProviderError) -> list[TokenEvent]:
        failed = plan.computed()
        for sequence in failed:
            del self._rows[sequence]
            self._scheduler.remove(sequence, keep_cache=False)
        return [TokenEvent(sequence, None, error=error) for sequence in failed]


def _sample_each(logits: Logits, rows: list[SamplingRow]) -> list[Sampled]:
    """Choose one token of every row whose grammar, if it has one, lets something follow."""
    going_on = [not row.ended for row in rows]
    if not all(going_on):
        logits = logits[going_on]
    chosen = iter(sample_batch(logits, [row for row, goes in zip(rows, going_on, strict=True) if goes]))
    results: list[Sampled] = []
    for row, goes in zip(rows, going_on, strict=True):
        result = next(chosen) if goes else None
        if result is None or isinstance(result, Exception):
            results.append(() if result is None else result)
        else:
            row.append(result)
            results.append((result,))
    return results
