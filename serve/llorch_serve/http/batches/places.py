"""Places that the lines of all batches share, so that they leave room to whoever waits for an answer.

Input: lines. Output: their turns, in the order in which they came: a line takes as many places as answers it
asks for at once. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from llorch_serve.batch.answering import Answerer, LineAnswer
from llorch_serve.batch.lines import BatchLine
from llorch_serve.files.json_errors import NOT_JSON


class Places:
    """So many places. most: at least 1."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """Wait for places, and have them; whoever wants more than there are has all of them."""
        count = min(count, self._most)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        self._serve()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():
                self._left += count
            self._serve()

    def _serve(self) -> None:
        while self._waiting:
            count, turn = self._waiting[0]
            if not turn.cancelled():  # whoever waited for it has left
                if count > self._left:
                    return
                self._left -= count
                turn.set_result(None)
            self._waiting.popleft()


class SharedAnswerer:
    """Has the lines of one batch share places with those of others."""

    def __init__(self, answerer: Answerer, places: Places) -> None:
        self._answerer = answerer
        self._places = places

    async def answer(self, line: BatchLine) -> LineAnswer:
        """Answer one line, once it has its places."""
        async with self._places.taken(answers_of(line.body)):
            return await self._answerer.answer(line)


_ABSENT: Final = msgspec.Raw(b"null")
_LONG_BYTES: Final = 256 * 2**10  # of a list whose items are not counted on the event loop
_MANY: Final = 2**20  # more than there are places, whatever the worker


class _Body(msgspec.Struct):
    n: int | None = None
    best_of: int | None = None
    prompt: msgspec.Raw = _ABSENT
    continuations: msgspec.Raw = _ABSENT
    documents: msgspec.Raw = _ABSENT


_decode = msgspec.json.Decoder(_Body).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def answers_of(body: bytes) -> int:
    """Return how many answers a body asks for at once, scores among them; 1 for one that its route will
    refuse.
    """
    try:
        found = _decode(body)
        prompts = max(1, _count(found.prompt)) * max(found.n or 1, found.best_of or 1)
        # Each document is scored twice: as one that is relevant, and as one that is not.
        return max(1, prompts, _count(found.continuations), 2 * _count(found.documents))
    except NOT_JSON:
        return 1


def _count(value: msgspec.Raw) -> int:
    """Return how many texts a list has; 0 for what is none, as for the token ids of one text."""
    view = memoryview(value)
    if bytes(view[:1]) != b"[" or bytes(view[1:64]).lstrip()[:1].isdigit():
        return 0
    return _MANY if len(view) > _LONG_BYTES else len(_decode_list(value))
