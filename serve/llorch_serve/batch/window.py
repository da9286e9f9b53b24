"""How much of a batch is under way at once: in answering, and between its answer and the disk."""

from __future__ import annotations

import asyncio


class Window:
    """Room for lines.

    most_lines, most_tokens: that are being answered; a line alone may have any tokens.
    most_unwritten: lines that are being answered, or wait for the disk or for lines before them.
    """

    def __init__(self, most_lines: int, most_tokens: int | None, most_unwritten: int) -> None:
        self._most_lines = most_lines
        self._most_tokens = most_tokens
        self._most_unwritten = max(most_unwritten, most_lines)
        self._lines = 0
        self._tokens = 0
        self._unwritten = 0
        self._changed = asyncio.Event()

    async def enter(self, tokens: int) -> None:
        """Wait until there is room for a line, and take it."""
        while not self._has_room(tokens):
            self._changed.clear()
            await self._changed.wait()
        self._lines += 1
        self._tokens += tokens
        self._unwritten += 1

    def leave(self, tokens: int) -> None:
        """Give back what a line took that has been answered."""
        self._lines -= 1
        self._tokens -= tokens
        self._changed.set()

    def written(self) -> None:
        """Give back the room of a line that is written."""
        self._unwritten -= 1
        self._changed.set()

    def _has_room(self, tokens: int) -> bool:
        if self._lines >= self._most_lines or self._unwritten >= self._most_unwritten:
            return False
        return self._most_tokens is None or not self._lines or self._tokens + tokens <= self._most_tokens
