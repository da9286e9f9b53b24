"""Watching what huggingface_hub asks and gets: its patience, what it takes at most, and what it shows.

Input is the client's own session; while it is watched, its requests and answers pass through
:mod:`llorch_serve.hub.patience` and :mod:`llorch_serve.hub.limits`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from llorch_serve.hub.credentials import redacted_warnings, require_usable_token
from llorch_serve.hub.limits import AnswerLimit, UnusableAnswerError
from llorch_serve.hub.patience import Patience

# The client takes a file's name in its cache from these, as they are.
_NAMES: Final = ("ETag", "X-Linked-Etag")


@contextlib.contextmanager
def watched_client(limit: AnswerLimit, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Watch what huggingface_hub asks inside. Raises UsageError if its token cannot be sent."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # reexported without __all__

    require_usable_token()
    session: Any = get_session()
    hooks = session.event_hooks
    patience = Patience(clock)
    with redacted_warnings():
        session.event_hooks = {
            "request": [*hooks["request"], patience.asking, limit.asking],
            "response": [*hooks["response"], patience.answered, limit.answered, _require_plain_names],
        }
        try:
            yield
        finally:
            session.event_hooks = hooks


def _require_plain_names(response: Any) -> None:
    """Raise UnusableAnswerError if the client would write to, or take as the file, what lies elsewhere."""
    if response.request.method != "HEAD":
        return
    for header in _NAMES:
        name = response.headers.get(header, "").removeprefix("W/").strip('"')
        if {"/", "\\", "\0", ":"} & set(name) or name in (".", ".."):
            raise UnusableAnswerError("names a file in a way that leads out of the cache")
