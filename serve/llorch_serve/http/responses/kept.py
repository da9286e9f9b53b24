"""Answers that are kept for ``previous_response_id``: in memory, within bounds of count, bytes and age.

Input: an answer's messages when it begins, and its document when it ends. Output: both, to the caller that
they belong to. What does not fit pushes an answer out: the oldest one of the caller that has the most. Used
by reading threads and the event loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from llorch_serve.http.openai_schema import Message

MAX_KEPT: Final = 1024
MAX_KEPT_BYTES: Final = 64 * 2**20
KEPT_S: Final = 3600.0

_MESSAGE_BYTES: Final = 512  # beside its texts
_CALL_BYTES: Final = 384
_WIDEST_CHAR_BYTES: Final = 4


@dataclass(slots=True)
class Kept:
    """One answer. messages: the whole conversation, with the answer once that has ended.

    owner: whose it is, where the worker knows its callers. size: bytes, those of the answers that it goes on
    from among them. document: the answer as JSON; none while it grows. items: the JSON of each of its items.
    """

    owner: str
    messages: tuple[Message, ...]
    size: int
    expires: float
    document: bytes = b""
    items: dict[str, bytes] = field(default_factory=dict)


def weight(message: Message) -> int:
    """Return about how many bytes a message takes, whose content is a text or none: never fewer than its
    texts do.
    """
    calls = message.tool_calls or ()
    texts = [message.role, message.content, message.name, message.tool_call_id]
    texts += [message.reasoning_content, message.reasoning]
    for call in calls:
        texts += [call.function.name, call.function.arguments, call.id]
    written = sum(_bytes_of(text) for text in texts if isinstance(text, str))
    return _MESSAGE_BYTES + _CALL_BYTES * len(calls) + written


def _bytes_of(text: str) -> int:
    """Return at least what a text takes: one character beyond Latin-1 widens all of them."""
    return len(text) if text.isascii() else _WIDEST_CHAR_BYTES * len(text)


class KeptResponses:
    """All answers that are kept. now: a clock, in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._kept: dict[str, Kept] = {}  # the oldest first
        self._of_items: dict[str, str] = {}  # from an item's id to its answer's
        self._of_owners: dict[str, dict[str, None]] = {}  # each one's answers, the oldest first
        self._sizes: dict[str, int] = {}  # bytes, by owner
        self._size = 0

    def begin(self, response_id: str, owner: str, messages: tuple[Message, ...], size: int) -> None:
        """Keep room for an answer that begins."""
        with self._lock:
            self._kept[response_id] = Kept(owner, messages, size, self._now() + KEPT_S)
            self._of_owners.setdefault(owner, {})[response_id] = None
            self._count(owner, size)
            self._shrink()

    def complete(self, response_id: str, answer: Message, document: bytes, items: dict[str, bytes]) -> None:
        """Keep an answer that has ended, unless it has been pushed out meanwhile."""
        with self._lock:
            kept = self._kept.get(response_id)
            if kept is None:
                return
            grown = len(document) + sum(map(len, items.values())) + weight(answer)
            kept.messages = (*kept.messages, answer)
            kept.document, kept.items, kept.size = document, items, kept.size + grown
            self._of_items |= dict.fromkeys(items, response_id)
            self._count(kept.owner, grown)
            self._shrink()

    def abandon(self, response_id: str) -> None:
        """Let go of an answer, unless it has ended."""
        with self._lock:
            kept = self._kept.get(response_id)
            if kept is not None and not kept.document:
                self._drop(response_id)

    def find(self, response_id: str, owner: str) -> Kept | None:
        """Return an answer that has ended; None: it is not kept, or not for this caller."""
        with self._lock:
            self._shrink()
            kept = self._kept.get(response_id)
            return kept if kept is not None and kept.document and kept.owner == owner else None

    def find_item(self, item_id: str, owner: str) -> bytes | None:
        """Return the JSON of an item of an answer that is kept for this caller."""
        with self._lock:
            self._shrink()
            kept = self._kept.get(self._of_items.get(item_id, ""))
            return kept.items[item_id] if kept is not None and kept.owner == owner else None

    def delete(self, response_id: str, owner: str) -> bool:
        """Let go of a caller's answer; tell whether it was kept."""
        with self._lock:
            kept = self._kept.get(response_id)
            if kept is None or not kept.document or kept.owner != owner:
                return False
            self._drop(response_id)
            return True

    def _count(self, owner: str, size: int) -> None:
        self._size += size
        self._sizes[owner] = self._sizes.get(owner, 0) + size

    def _shrink(self) -> None:
        """Let go of what is too old and of what is too much, so that no caller pushes out what others keep
        unless it has less than they.
        """
        now = self._now()
        while self._kept and self._kept[oldest := next(iter(self._kept))].expires <= now:
            self._drop(oldest)
        while len(self._kept) > MAX_KEPT:
            self._drop_of(max(self._of_owners, key=lambda owner: len(self._of_owners[owner])))
        while self._size > MAX_KEPT_BYTES:
            self._drop_of(max(self._of_owners, key=self._sizes.__getitem__))

    def _drop_of(self, owner: str) -> None:
        """Let go of a caller's oldest answer."""
        self._drop(next(iter(self._of_owners[owner])))

    def _drop(self, response_id: str) -> None:
        dropped = self._kept.pop(response_id)
        for item_id in dropped.items:
            del self._of_items[item_id]
        self._count(dropped.owner, -dropped.size)
        own = self._of_owners[dropped.owner]
        del own[response_id]
        if not own:
            del self._of_owners[dropped.owner], self._sizes[dropped.owner]
