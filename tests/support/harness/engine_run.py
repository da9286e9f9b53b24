"""Sequences run to their ends by an engine over a session, a fake one or real."""

from __future__ import annotations

from collections.abc import Sequence

from llorch_serve.engine.engine import Engine
from llorch_serve.engine.runner import Session
from llorch_serve.engine.scheduler import Scheduler, SchedulerConfig
from llorch_serve.engine.sequence import Sequence as TokenSequence


def run_all(session: Session, sequences: Sequence[TokenSequence]) -> list[Exception]:
    """Run all of them, at most four at a time with 64 tokens each; return the errors that some ended with."""
    engine = Engine(
        session, Scheduler(SchedulerConfig(slots=4, budget=4 * 64, prefill_chunk=8, max_waiting=9))
    )
    engine.add(*sequences)
    errors: list[Exception] = []
    while engine.live:
        errors += [event.error for event in engine.step() if event.error is not None]
    return errors


def answers(sequences: Sequence[TokenSequence]) -> list[list[int]]:
    """Return the tokens that each has generated."""
    return [sequence.token_ids[sequence.prompt_length :] for sequence in sequences]
