"""Skips that may happen in ``ci/test``, and why: every other one fails the run, so that no test stops running
unseen.

A run without LLORCH_NO_SURPRISING_SKIPS skips whatever it likes: pytest by hand, in an environment that lacks
extras.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from typing import Final

VARIABLE: Final = "LLORCH_NO_SURPRISING_SKIPS"


@dataclass(frozen=True, slots=True)
class ExpectedSkip:
    """tests: a pattern of test ids from the repository's root. reason: an expression that pytest's reason
    begins with. why: for people.
    """

    tests: str
    reason: str
    why: str


EXPECTED: Final = (
    ExpectedSkip(
        "tests/unit/test_huge_pages.py*",
        "huge pages: ",
        "a kernel may lack transparent huge pages, or be told never to give them",
    ),
    ExpectedSkip("tests/e2e/test_failures.py*", "mounting a small disk", "takes root and its capabilities"),
    ExpectedSkip("tests/e2e/test_http_serve_command.py*", "curl is not installed", "no dependency of llorch"),
    ExpectedSkip("tests/e2e/test_document_examples.py*", "curl is not installed", "no dependency of llorch"),
)


def is_expected(test: str, reason: str) -> bool:
    """Return whether a skip is in the list. test: its id, or the file's that was skipped whole."""
    reason = reason.removeprefix("Skipped: ")
    return any(
        fnmatch.fnmatchcase(test, one.tests) and re.match(one.reason, reason) is not None for one in EXPECTED
    )


def complaint(surprises: list[tuple[str, str]]) -> str:
    """Say which skips were not expected, and what to do."""
    lines = [f"  {test}: {reason}" for test, reason in surprises]
    return "\n".join(
        [
            f"error: {len(surprises)} skipped that tests/expected_skips.py does not expect:",
            *lines,
            "Install or provide what each needs so that it runs; where it cannot run on some machines, add "
            "it there with the reason.",
        ]
    )
