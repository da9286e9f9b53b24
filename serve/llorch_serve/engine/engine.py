"""One step of generation at a time: schedule, run, sample, update. Synchronous; everything it needs is
injected.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from llorch_serve.engine.containment import FAILED_CALLS, Failure, make_call, make_edits, sample
from llorch_serve.engine.drafter import Drafter
from llorch_serve.engine.load import Load, TokenRate
from llorch_serve.engine.plan import DraftBatch, PrefillChunk, SharedStart, StepPlan
from llorch_serve.engine.runner import Session
from llorch_serve.engine.scheduler import Scheduler
from llorch_serve.engine.sequence import Sequence, TokenEvent
from llorch_serve.structured.constraint import MaskThread

logger = logging.getLogger(__name__)


class Engine:
    """Owns a session, a scheduler and every live sequence. Not thread-safe.

    live: sequences that have been added and have not ended.
    drafter: guesses what sequences will say next; None: nothing does, or they do it themselves.
    """

    def __init__(
        self,
        session: Session,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.perf_counter,
        *,
        drafter: Drafter | None = None,
    ) -> None:
        self.live: set[Sequence] = set()
        self._session = session
        self._scheduler = scheduler
        self._clock = clock
        self._drafter = drafter
        self._draft_failure: Exception | None = None
        self._masks = MaskThread()
        self._rate = TokenRate()

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences, all or none. Raises QueueFullError."""
        self._scheduler.add(*sequences)
        self.live.update(sequences)
        if self._drafter is None:
            return
        try:
            for sequence in sequences:
                if sequence.sampling is not None:
                    sequence.draft = self._drafter.begin(sequence)
        except FAILED_CALLS as error:
            self._leave_out_draft(error)

    def abort(self, sequence: Sequence) -> bool:
        """Forget a sequence; its slot is free for the next step. Return whether it was live; if not, nothing
        is done.
        """
        if sequence not in self.live:
            return False
        self.live.discard(sequence)
        self._scheduler.remove(sequence)
        return True

    def step(self) -> list[TokenEvent]:
        """Run one call and return its tokens; an empty list if nothing was due or no token resulted.

        What ends with an error when something fails: see :mod:`llorch_serve.engine.containment`.
        """
        plan = self._scheduler.schedule()
        if plan is None:
            return []
        if isinstance(plan.call, PrefillChunk | SharedStart) and plan.call.sequence.times.started_at is None:
            plan.call.sequence.times.started_at = self._clock()
        failure = make_edits(self._session, plan)
        self._mirror(plan, failed=failure is not None)
        if failure is not None:
            return self._fail(plan, failure)
        if isinstance(plan.call, DraftBatch):
            self._guess(plan.call)
            return []
        # Without a payoff nobody asks what a step takes.
        started = None if self._scheduler.guessing.payoff is None else self._clock()
        logits = make_call(self._session, plan)
        if isinstance(logits, Failure):
            return self._fail(plan, logits)
        results = sample(plan.call, logits, self._masks)
        seconds = 0.0 if started is None else self._clock() - started
        events = self._scheduler.update(plan, results, seconds)
        now, tokens = self._clock(), 0
        for event in events:
            times = event.sequence.times
            if times.first_token_at is None:
                times.first_token_at = now
            times.last_token_at = now
            tokens += event.token_id is not None
            if event.finish is not None or event.error is not None:
                self.live.discard(event.sequence)
        self._rate.count(now, tokens)
        return events

    @property
    def draft_failure(self) -> Exception | None:
        """Why the draft model guesses no more; None: it has not failed."""
        return self._draft_failure

    @property
    def slots(self) -> int:
        """How many sequences run at once."""
        return self._scheduler.slots

    def held(self, sequence: Sequence) -> int:
        """Return how many tokens of a prompt the cache holds; from any thread, as of about now."""
        return self._scheduler.held(sequence)

    def close(self) -> None:
        """End the thread of masks."""
        self._masks.close()

    def load(self) -> Load:
        """Return how busy the engine is; from any thread, as of the last step."""
        return replace(self._scheduler.load(), tokens_per_second=self._rate.per_second(self._clock()))

    def _mirror(self, plan: StepPlan, *, failed: bool) -> None:
        """Have the draft's slots follow the model's."""
        if self._drafter is None:
            return
        if failed:
            self._drafter.forget()
            return
        try:
            self._drafter.follow(plan.edits)
        except FAILED_CALLS as error:
            self._leave_out_draft(error)
            return
        match plan.call:
            case SharedStart(sequence=sequence, slot=slot):
                self._drafter.start(sequence, slot)
            case PrefillChunk(sequence=sequence, slot=slot, start=start) if start == sequence.cache.reused:
                self._drafter.start(sequence, slot)

    def _guess(self, batch: DraftBatch) -> None:
        if self._drafter is None:  # it has just failed
            return
        try:
            self._scheduler.guessing.take(batch, self._drafter.guess(batch))
        except FAILED_CALLS as error:
            self._leave_out_draft(error)

    def _leave_out_draft(self, error: Exception) -> None:
        """Go on without the draft model, whose failure is nobody's: no answer depends on its guesses."""
        logger.warning("the draft model has failed and guesses no more, answers go on: %s", error)
        self._drafter = None
        self._draft_failure = error
        for sequence in self.live:
            sequence.draft = None

    def _fail(self, plan: StepPlan, failure: Failure) -> list[TokenEvent]:
        """End the sequences of a plan that was not carried out."""
        failed = self._scheduler.fail(plan, failure.missed_edits)
        self.live.difference_update(failed)
        return [TokenEvent(sequence, None, error=failure.error) for sequence in failed]
