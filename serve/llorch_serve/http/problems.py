"""Errors of ours as HTTP statuses: the table of the worker's contract, in OpenAI's words and in the older
worker's.

Input: whatever a request ended with. Output: a :class:`Problem`, and from it a body in the shape that the
route's clients read. Anything but a request's own error and want of memory is a bug: the log has both under
an error id, and the client gets the id.
"""

from __future__ import annotations

import logging
import math
import secrets
from dataclasses import dataclass
from typing import Any, Final

from llorch_serve.errors import (
    AuthenticationError,
    CancelledError,
    EngineStoppedError,
    FieldViolation,
    InvalidRequestError,
    LlorchError,
    LoggedError,
    ModelMismatchError,
    NonFiniteLogitsError,
    QueueFullError,
    ResourceError,
    UnavailableError,
    UnsupportedError,
    WorkerError,
)
from llorch_serve.http.fields import MAX_LISTED, first_fields

logger = logging.getLogger(__name__)

CLIENT_CLOSED: Final = 499
"""What nginx calls a request that was given up; HTTP has no number for it."""

_MAX_TEXT_CHARS: Final = 2000
_SOON: Final = (("Retry-After", "1"),)


class HttpError(LlorchError):
    """A request that HTTP itself refuses: an unknown path, a body too large, a token that is wrong."""

    def __init__(
        self, status: int, code: str, message: str, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.status = status
        self.code = code
        self.headers = headers
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Problem:
    """One refusal. status: HTTP's. kind, code: OpenAI's error type and code. violations: every bad field."""

    status: int
    kind: str
    code: str
    message: str
    violations: tuple[FieldViolation, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()

    def openai(self) -> dict[str, Any]:
        """Return the body that OpenAI's clients read. ``errors``, beyond their schema, lists every bad
        field.
        """
        param = self.violations[0].field if self.violations else None
        body: dict[str, Any] = {
            "message": self.message,
            "type": self.kind,
            "param": param,
            "code": self.code,
        }
        if self.violations:
            body["errors"] = self.listed()
        return {"error": body}

    def plain(self) -> dict[str, Any]:
        """Return the body that clients of the older worker read: ``errors`` with every field, or one
        ``error``.
        """
        if self.violations:
            return {"errors": self.listed()}
        return {"error": {"code": self.code, "message": self.message}}

    def listed(self) -> list[dict[str, str]]:
        """Return every bad field with its message."""
        return [{"field": v.field, "message": v.description} for v in self.violations]


def describe(error: Exception, *, route: str) -> Problem:
    """Return the problem that an error is."""
    text = str(error)[:_MAX_TEXT_CHARS]
    match error:
        case HttpError():
            kind = "authentication_error" if error.status == 401 else "invalid_request_error"
            return Problem(error.status, kind, error.code, text, headers=error.headers)
        case InvalidRequestError():
            return Problem(400, "invalid_request_error", "invalid_value", text, _listed(error.violations))
        case ModelMismatchError():
            model = (FieldViolation("model", text),)
            return Problem(404, "invalid_request_error", "model_not_found", text, model)
        case UnsupportedError():
            return Problem(422, "invalid_request_error", "unsupported", text)
        case QueueFullError():
            wait = (("Retry-After", str(max(1, math.ceil(error.retry_after_s)))),)
            return Problem(429, "rate_limit_error", "queue_full", text, headers=wait)
        case UnavailableError():
            return Problem(503, "service_unavailable", error.reason.lower(), text, headers=_SOON)
        case CancelledError():
            return Problem(CLIENT_CLOSED, "cancelled", "cancelled", text)
        case AuthenticationError() | WorkerError():  # of a worker elsewhere that was to answer
            refuses = isinstance(error, AuthenticationError)
            status, kind = (401, "authentication_error") if refuses else (502, "server_error")
            return Problem(status, kind, "invalid_api_key" if refuses else "worker_failed", text)
        case LoggedError():  # where it happened
            code = "engine_stopped" if isinstance(error, EngineStoppedError) else "internal_error"
            return Problem(500, "server_error", code, text)
        case NonFiniteLogitsError():  # the artifact's fault: whoever runs the worker should know too
            logger.error("%s: %s", route, text)
            return Problem(500, "server_error", "non_finite_logits", text)
    error_id = secrets.token_hex(4)
    logger.error("%s failed, error id %s", route, error_id, exc_info=error)
    if isinstance(error, ResourceError):  # what to change is for whoever runs the worker
        message = f"the worker's memory is full; try again later. Its log says more under error id {error_id}"
        return Problem(429, "rate_limit_error", "out_of_memory", message, headers=_SOON)
    message = f"internal error; the worker's log says more under error id {error_id}"
    return Problem(500, "server_error", "internal_error", message)


def _listed(bad: tuple[FieldViolation, ...]) -> tuple[FieldViolation, ...]:
    """Return the bad fields that an answer lists: a generator may have found hundreds of thousands. Where a
    body is read, they have been counted already, in one more.
    """
    return bad if len(bad) <= MAX_LISTED + 1 else first_fields(bad)
