"""Refusals in the shape of Anthropic's API.

Input: a :class:`llorch_serve.http.problems.Problem`. Output: the body, whose ``type`` follows the status.
"""

from __future__ import annotations

from typing import Any, Final

from llorch_serve.http.problems import Problem

_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error_body(problem: Problem) -> dict[str, Any]:
    """Return the body that Anthropic's clients read. ``errors``, beyond their schema, lists every bad
    field.
    """
    error: dict[str, Any] = {
        "type": _KINDS.get(problem.status, "invalid_request_error"),
        "message": problem.message,
    }
    if problem.violations:
        error["errors"] = problem.listed()
    return {"type": "error", "error": error}
