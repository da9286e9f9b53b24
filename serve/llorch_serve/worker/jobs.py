"""What every request that runs on the engine has, whether text is generated or continuations are scored.

The intake builds a job whole; ``live_requests.py`` puts every event of its sequences through
:meth:`Job.take`, on the engine's thread, and what comes back goes to the request's sink.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from llorch_serve.engine.sequence import FinishReason, Sequence, TokenEvent
from llorch_serve.requests import Completion, GenerationUpdate, Timings, UpdateSink


class Job(Protocol):
    """One request: :class:`llorch_serve.worker.answers.Answers` or
    :class:`llorch_serve.worker.scores.Scores`.

    sequences: those of the request; each one's ``index`` is its place here.
    open: how many of them go on; 0: the request has ended, or failed.
    aborted: the caller does not wait for it.
    """

    request_id: str
    sink: UpdateSink
    open: int
    aborted: bool

    @property
    def sequences(self) -> Seq[Sequence]:
        """The sequences in the order of their index."""

    def __hash__(self) -> int:
        """Tell jobs apart by identity."""

    def take(self, event: TokenEvent) -> tuple[list[GenerationUpdate], bool]:
        """Take an event; return what is to be told now, and whether text ended the sequence before the engine
        did.

        An event of a sequence that is another request's, or has ended here, tells nothing. What fails becomes
        an update with the error, which ends this request and no other.
        """


def ended(
    sequence: Sequence,
    reason: FinishReason,
    *,
    stop_matched: str | None = None,
    generated: int = 0,
    seed: int = 0,
) -> Completion:
    """Return how a sequence ended, with its figures; those of the prompt go with the request's first one.

    generated: tokens that were told. A sequence may have more: guesses that were right go beyond a stop
        string.
    """
    times, first = sequence.times, sequence.index == 0
    started_at = times.submitted_at if times.started_at is None else times.started_at
    first_token_at = started_at if times.first_token_at is None else times.first_token_at
    last_token_at = first_token_at if times.last_token_at is None else times.last_token_at
    return Completion(
        reason=reason,
        stop_matched=stop_matched,
        prompt_tokens=sequence.prompt_length if first else 0,
        generated_tokens=generated,
        cached_tokens=sequence.cache.reused if first else 0,
        drafted_tokens=sequence.drafts.drafted,
        accepted_tokens=sequence.drafts.accepted,
        seed=seed,
        timings=Timings(
            queue_s=started_at - times.submitted_at,
            prefill_s=first_token_at - started_at,
            decode_s=last_token_at - first_token_at,
        ),
    )
