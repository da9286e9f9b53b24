"""One step of generation at a time: schedule, run, sample, update. Synchronous; everything it needs is injected."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from llorch_serve.errors import ProviderError, ResourceError
from llorch_serve.load import Load, TokenRate
from llorch_serve.plan import StepPlan
from llorch_serve.runner import Logits, Session, apply_edits, run
from llorch_serve.sampler import SamplingRow, sample_batch, sample_draft
from llorch_serve.scheduler import Sampled, Scheduler
from llorch_serve.sequence import Sequence, SequenceStatus, TokenEvent


class Engine:
    """Owns a session, a scheduler and the sampling state of every live sequence. Not thread-safe."""

    def __init__(
        self, session: Session, scheduler: Scheduler, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._session = session
        self._scheduler = scheduler
        self._clock = clock
        self._rows: dict[Sequence, SamplingRow] = {}
        self._rate = TokenRate()

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

        A model call that fails, for want of memory too, ends the sequences of this step with that error, and no
        others; a failure while one sequence's token is chosen ends that one.
        """
        plan = self._scheduler.schedule()
        if plan is None:
            return []
        self._stamp_start(plan)
        apply_edits(self._session, plan)
        try:
            logits = run(self._session, plan)
        except (ProviderError, ResourceError, MemoryError) as error:
            return self._fail(plan, error)
        events = self._scheduler.update(plan, self._sample(plan, logits))
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

    def load(self) -> Load:
        """Return how busy the engine is; from any thread, as of the last step."""
        return replace(self._scheduler.load(), tokens_per_second=self._rate.per_second(self._clock()))

    def _sample(self, plan: StepPlan, logits: Logits) -> list[Sampled]:
        """Choose the tokens of every sequence of the step, and count them in its sampling state."""
        if plan.verify is not None:
            try:
                return [sample_draft(logits, self._rows[plan.verify.sequence], plan.verify.draft)]
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this sequence's own
                return [error]
        rows = [self._rows[sequence] for sequence in plan.sampled()]
        results: list[Sampled] = []
        for row, result in zip(rows, _choose(logits, rows), strict=True):
            if isinstance(result, Exception):
                results.append(result)
                continue
            try:
                row.append(result)
            except Exception as error:  # noqa: BLE001 - as above
                results.append(error)
            else:
                results.append((result,))
        return results

    def _stamp_start(self, plan: StepPlan) -> None:
        if plan.prefill is not None and plan.prefill.sequence.started_at is None:
            plan.prefill.sequence.started_at = self._clock()

    def _fail(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        failed = plan.computed()
        for sequence in failed:
            del self._rows[sequence]
            self._scheduler.remove(sequence, keep_cache=False)
        return [TokenEvent(sequence, None, error=error) for sequence in failed]


def _choose(logits: Logits, rows: Seq[SamplingRow]) -> list[int | Exception]:
    """Choose every row's token; one whose choice fails, for whatever reason, gets the error and its neighbours do not."""
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
