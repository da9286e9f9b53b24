"""Which shape the refusals of a route have: that which its clients read.

Used by what answers outside of a dialect: the guard, and routes that are computed at once.
"""

from __future__ import annotations

from typing import Final

from llorch_serve.http.messages.errors import error_body
from llorch_serve.http.problems import Problem

JOB_PATHS: Final = ("/v1/inference", "/execute", "/cancel")


def refusal_body(problem: Problem, path: str) -> object:
    """Return the body of a refusal."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return error_body(problem)
    return problem.plain() if path in JOB_PATHS else problem.openai()
