"""What HTTP's clients are told of failures that are the machine's."""

from __future__ import annotations

import logging

from llorch_serve.errors import OUT_OF_MEMORY, ResourceError
from llorch_serve.http.problems import describe


def test_too_little_memory_is_told_without_what_the_log_says(caplog):
    with caplog.at_level(logging.ERROR):
        problem = describe(ResourceError("no memory for a secret path"), route="/v1/completions")
    assert (problem.status, problem.code, problem.message) == (503, "out_of_memory", OUT_OF_MEMORY)
    assert problem.headers == ()
    assert "/v1/completions: no memory for a secret path" in caplog.text
