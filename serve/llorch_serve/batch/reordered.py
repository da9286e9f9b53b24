"""Answers that keep the order of their lines, though they come in another one."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Reordered(Generic[T]):
    """What came before its turn, and waits for those before it.

    most_bytes: that may wait; beyond it all goes on as it came, and is put in order on the disk at the end.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._early: dict[int, tuple[T, int]] = {}
        self._bytes = 0
        self._gone_early: set[int] = set()
        self._next = 0

    def put(self, turn: int, one: T, size: int) -> list[T]:
        """Take one of ``size`` bytes, before which ``turn`` others are to go; return all that goes on now."""
        self._early[turn] = (one, size)
        self._bytes += size
        going = []
        while self._next in self._early or self._next in self._gone_early:
            if self._next in self._early:
                going.append(self._take(self._next))
            self._gone_early.discard(self._next)
            self._next += 1
        if self._bytes > self._most_bytes:
            self._gone_early |= self._early.keys()
            going += [self._take(turn) for turn in sorted(self._early)]
        return going

    def _take(self, turn: int) -> T:
        one, size = self._early.pop(turn)
        self._bytes -= size
        return one
