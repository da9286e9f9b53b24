"""What batches are run against in tests: answers that depend on the line alone, and failures on demand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from llorch_serve.batch.answering import LineAnswer, Usage
from llorch_serve.batch.header import make_header
from llorch_serve.batch.journal import Journal, open_journal
from llorch_serve.batch.lines import BatchLine, LineForm
from llorch_serve.batch.opening import open_source
from llorch_serve.batch.place import hold_output
from llorch_serve.batch.plan import Order, Plan, make_plan
from llorch_serve.batch.retries import Clock
from llorch_serve.batch.run import Limits, run_batch
from llorch_serve.batch.summary import Summary

LIMITS = Limits(lines_in_flight=4)


class FakeAnswerer:
    """Answers each line with a text made of its own bytes, after ``turns`` rounds of the event loop.

    refusals: what a line gets the first times, by custom_id, before its answer. statuses: of answers, by
    custom_id, where they are no 200.
    """

    def __init__(
        self,
        refusals: Mapping[str, list[LineAnswer]] | None = None,
        turns: Callable[[BatchLine], int] = lambda _: 0,
        statuses: Mapping[str, int] | None = None,
    ) -> None:
        self.asked: list[str] = []
        self.most_at_once = 0
        self._at_once = 0
        self._refusals = {name: list(answers) for name, answers in (refusals or {}).items()}
        self._turns = turns
        self._statuses = statuses or {}

    async def answer(self, line: BatchLine) -> LineAnswer:
        """Answer a line."""
        self.asked.append(line.custom_id)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            for _ in range(self._turns(line)):
                await asyncio.sleep(0)
        finally:
            self._at_once -= 1
        if waiting := self._refusals.get(line.custom_id):
            return waiting.pop(0)
        text = hashlib.sha256(line.body).hexdigest()[: 8 + len(line.body) % 40]
        status = self._statuses.get(line.custom_id, 200)
        body = msgspec.json.encode({"text": text})
        return LineAnswer(status, f"req-{line.custom_id}", body, None, Usage(3, 2, 1))


class FakeClock:
    """A time that passes when somebody waits. waited: for how long each time."""

    def __init__(self) -> None:
        self.waited: list[float] = []
        self._now = 0.0

    def clock(self) -> Clock:
        """Return this as what a batch takes."""
        return Clock(now=lambda: self._now, sleep=self._sleep, random=lambda: 0.0)

    async def _sleep(self, seconds: float) -> None:
        self.waited.append(seconds)
        self._now += seconds
        await asyncio.sleep(0)


@contextlib.contextmanager
def opened(
    source: Path,
    output: Path,
    *,
    form: LineForm | None = None,
    order: Order = Order.GIVEN,
    ordered: bool = False,
    retry_failed: bool = False,
    fingerprint: str = "model-1",
) -> Iterator[tuple[Plan, Journal]]:
    """Open all that a batch needs."""
    form = form or LineForm()
    with (
        hold_output(output) as place,
        open_source(source, place.work_folder) as lines,
        make_plan(lines, form, place.work_folder, order) as plan,
    ):
        header = make_header(plan.input_sha256, form.settings, fingerprint, ordered=ordered)
        with open_journal(place, header, plan, retry_failed=retry_failed) as journal:
            yield plan, journal


def run(
    source: Path,
    output: Path,
    answerer: FakeAnswerer | None = None,
    *,
    limits: Limits = LIMITS,
    clock: FakeClock | None = None,
    tell: Callable[[Summary], None] = lambda _: None,
    **how: object,
) -> Summary:
    """Run a whole batch."""
    with opened(source, output, **how) as (plan, journal):  # type: ignore[arg-type]
        return asyncio.run(
            run_batch(
                plan,
                journal,
                answerer or FakeAnswerer(),
                limits,
                tell,
                clock=clock.clock() if clock else None,
            )
        )
