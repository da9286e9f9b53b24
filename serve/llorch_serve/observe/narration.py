"""What happens, told as events: who did what to what, in words for people and fields for machines.

Input: the worker's life, and requests as ``tap.py`` sees them. Output: logging records with ``actor``,
``action``, ``target``, ``human``, ids, durations and token counts. No text of a prompt or an answer is among
them, nor the words of a refusal, which may quote one.
"""

from __future__ import annotations

import logging
from typing import Final

from llorch_serve.errors import RequestError
from llorch_serve.observe.logs import FIELDS
from llorch_serve.observe.observer import SCORE, Answered, Ending, Observed
from llorch_serve.requests import Completion

logger = logging.getLogger("llorch.narration")

_MS: Final = 1000.0
_MAX_PATH_CHARS: Final = 200


class Narrator:
    """Tells events of one worker. Implements :class:`llorch_serve.observe.observer.Observer`."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id

    def tell(
        self, action: str, target: str, human: str, *, level: int = logging.INFO, **fields: object
    ) -> None:
        """Log one event; fields that are None are left out."""
        if not logger.isEnabledFor(level):
            return
        named = {"actor": "worker", "action": action, "target": target, "worker_id": self._worker_id}
        given = {name: value for name, value in fields.items() if value is not None and value != ""}
        logger.log(level, "%s", human, extra={FIELDS: named | given})

    def begun(self, seen: Observed) -> None:
        """Tell that a request has come."""
        request = seen.request
        self.tell(
            "inference.receive",
            request.request_id,
            f"{request.request_id}: received",
            level=logging.DEBUG,
            job_id=request.request_id,
            correlation_id=request.correlation_id,
        )

    def produced(self, seen: Observed, tokens: int, gap_s: float | None) -> None:
        """See the protocol: tokens are not told one by one."""

    def ended(self, seen: Observed, ending: Ending) -> None:
        """Tell how a request ended."""
        request = seen.request
        whole_s = ending.at_s - seen.submitted_s
        first_s = None if seen.first_s is None else seen.first_s - seen.submitted_s
        completion = ending.completion
        if completion is None:
            kind = type(ending.error).__name__
            action, human = "inference.fail", f"{request.request_id}: ended with {kind}"
        elif ending.scored:
            action, human = "inference.complete", _scores(request.request_id, seen, completion, whole_s)
        else:
            action, human = "inference.complete", _sentence(request.request_id, completion, whole_s, first_s)
        self.tell(
            action,
            request.request_id,
            human,
            level=logging.INFO if completion or isinstance(ending.error, RequestError) else logging.WARNING,
            job_id=request.request_id,
            correlation_id=request.correlation_id,
            error_kind=type(ending.error).__name__ if completion is None else None,
            finish_reason=None if completion is None else SCORE if ending.scored else completion.reason.value,
            tokens_in=None if completion is None else completion.prompt_tokens,
            tokens_cached=None if completion is None else completion.cached_tokens,
            tokens_out=None if completion is None else completion.generated_tokens,
            duration_ms=round(whole_s * _MS, 1),
            queue_ms=None if completion is None else round(completion.timings.queue_s * _MS, 1),
            first_token_ms=None if first_s is None else round(first_s * _MS, 1),
            continuations=len(seen.scores) if ending.scored else None,
            replica=ending.replicas[-1] if ending.replicas else None,
            replicas_failed=list(ending.replicas[:-1]) or None,
        )

    def answered(self, answered: Answered) -> None:
        """Tell of an answer over HTTP."""
        path = answered.path[:_MAX_PATH_CHARS]
        status = "left" if answered.status is None else answered.status
        self.tell(
            "http.answer",
            path,
            f"{answered.method} {path}: {status} in {answered.seconds * _MS:.0f} ms",
            level=logging.DEBUG,
            correlation_id=answered.correlation_id,
            status=answered.status,
            duration_ms=round(answered.seconds * _MS, 1),
        )

    def close(self) -> None:
        """See the protocol: nothing is held back."""


def _scores(request_id: str, seen: Observed, completion: Completion, whole_s: float) -> str:
    return (
        f"{request_id}: {completion.prompt_tokens} tokens ({completion.cached_tokens} cached), "
        f"{len(seen.scores)} continuations scored in {whole_s:.2f} s"
    )


def _sentence(request_id: str, completion: Completion, whole_s: float, first_s: float | None) -> str:
    first = "" if first_s is None else f", the first after {first_s:.2f} s"
    return (
        f"{request_id}: {completion.prompt_tokens} prompt tokens ({completion.cached_tokens} cached), "
        f"{completion.generated_tokens} generated in {whole_s:.2f} s{first}; {completion.reason.value}"
    )
