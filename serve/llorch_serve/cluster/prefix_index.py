"""Which prompts the KV cache of each replica probably still holds, seen from one front.

Input: the token ids of each prompt and the replica that it went to. Output: how many tokens of a new prompt
each replica need not compute again. A front knows only what it has sent itself, so the index follows the
rules of ``engine/slots.py``: a replica holds one prompt a slot, a prompt that goes on from another takes its
place, and the one that was not used for longest gives way.

A prompt is kept as a chain of hashes, one for each whole block of 32 tokens, and the few tokens behind the
last whole block. A hash stands for all tokens before it, so equal hashes are equal prefixes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

BLOCK: Final = 32
"""Tokens of a hash."""

SHORTEST_MATCH: Final = 16
"""Tokens below which a replica computes a prefix again rather than reuse it (``engine/reuse.py``)."""

MOST_HASHES: Final = 500_000
"""Of all replicas together, which take some 150 MB: 16 million tokens of prompts."""

_DIGEST_BYTES: Final = 8
_ID_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt as it is looked up.

    chain: the hash of the cache salt, then one for each whole block of ``token_ids``.
    """

    token_ids: Sequence[int]
    chain: tuple[int, ...]


def prefix_of(token_ids: Sequence[int], cache_salt: str = "") -> Prefix:
    """Return the prefix of a prompt. cache_salt: replicas reuse nothing between prompts of different ones."""
    data = memoryview(array("q", token_ids).tobytes())
    digest = hashlib.blake2b(cache_salt.encode(), digest_size=_DIGEST_BYTES).digest()
    chain = [int.from_bytes(digest)]
    for start in range(0, len(token_ids) // BLOCK * BLOCK * _ID_BYTES, BLOCK * _ID_BYTES):
        block = hashlib.blake2b(digest, digest_size=_DIGEST_BYTES)
        block.update(data[start : start + BLOCK * _ID_BYTES])
        digest = block.digest()
        chain.append(int.from_bytes(digest))
    return Prefix(token_ids, tuple(chain))


class Held:
    """A prompt that a replica probably holds.

    rest: the tokens behind its last whole block. used: when it was last sent there, by the index's own clock.
    """

    __slots__ = ("chain", "replica", "rest", "used")

    def __init__(self, replica: str, prefix: Prefix) -> None:
        self.replica = replica
        self.chain = prefix.chain
        self.rest = _rest(prefix)
        self.used = 0

    def is_of(self, prefix: Prefix) -> bool:
        """Tell whether it is that prompt."""
        return self.chain == prefix.chain and self.rest == _rest(prefix)

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return (len(self.chain) - 1) * BLOCK + len(self.rest)


@dataclass(frozen=True, slots=True)
class Match:
    """The prompt of a replica that most of a new one is equal to. length: tokens that are equal."""

    held: Held
    length: int


class PrefixIndex:
    """The prompts that replicas hold. For one thread."""

    def __init__(self) -> None:
        self._held: dict[
            str, OrderedDict[Held, None]
        ] = {}  # the one that was not used for longest comes first
        self._slots: dict[str, int] = {}
        self._by_hash: dict[int, set[Held]] = {}  # every prompt that has the hash in its chain
        self._by_end: dict[int, set[Held]] = {}  # those whose chain ends with it
        self._clock = 0
        self._hashes = 0

    def keep(self, replicas: Mapping[str, int]) -> None:
        """Say which replicas there are, and the slots of each; what others held is forgotten."""
        for replica in self._held.keys() - replicas.keys():
            for held in list(self._held[replica]):
                self._forget(held)
            del self._held[replica], self._slots[replica]
        for replica, slots in replicas.items():
            self._slots[replica] = max(1, slots)
            prompts = self._held.setdefault(replica, OrderedDict())
            while len(prompts) > self._slots[replica]:
                self._forget(next(iter(prompts)))

    def matches(self, prefix: Prefix) -> dict[str, Match]:
        """Return the longest match of each replica that has one of at least 16 tokens."""
        found: dict[str, Match] = {}
        counted = 0
        for depth in range(self._deepest(prefix), -1, -1):
            key = prefix.chain[depth]
            begun = depth * BLOCK
            following = prefix.token_ids[begun : begun + BLOCK]
            for held in self._by_end.get(key, ()):
                _note(found, held, begun + _common(following, held.rest))
            sharing = self._by_hash.get(key, set())
            if len(sharing) > counted:  # else they are those of the block behind it
                counted = len(sharing)
                for held in sharing:
                    _note(found, held, begun)
        return found

    def displaced(self, replica: str, match: Match | None) -> Held | None:
        """Return the prompt that gives way where one with that match is sent to the replica, or None."""
        prompts = self._held[replica]
        oldest = next(iter(prompts)) if len(prompts) >= self._slots[replica] else None
        if match is not None:
            lost = match.held.length - match.length
            if lost <= (0 if oldest is None else oldest.length):
                return match.held
        return oldest

    def last_use(self, replica: str) -> int:
        """Return when the prompt was last used that the next new one displaces; 0 where a slot is empty."""
        prompts: Mapping[Held, None] = self._held.get(replica, {})
        return next(iter(prompts)).used if len(prompts) >= self._slots.get(replica, 1) else 0

    def sent(self, replica: str, prefix: Prefix) -> None:
        """Take note that a prompt has been sent to a replica; one that is not kept is ignored."""
        if replica not in self._held:
            return
        newest = next(reversed(self._held[replica]), None)
        if newest is not None and newest.is_of(prefix):
            return  # it is known that it was sent there
        match = self.matches(prefix).get(replica)
        given_way = self.displaced(replica, match)
        if match is not None:
            self._touch(match.held)
        if given_way is not None:
            self._forget(given_way)
        held = Held(replica, prefix)
        for key in held.chain[1:]:
            self._by_hash.setdefault(key, set()).add(held)
        self._by_end.setdefault(held.chain[-1], set()).add(held)
        self._held[replica][held] = None
        self._hashes += len(held.chain)
        self._touch(held)
        while self._hashes > MOST_HASHES:
            oldest = [next(iter(prompts)) for prompts in self._held.values() if prompts]
            self._forget(min(oldest, key=lambda one: one.used))

    def _touch(self, held: Held) -> None:
        self._clock += 1
        held.used = self._clock
        self._held[held.replica].move_to_end(held)

    def _forget(self, held: Held) -> None:
        del self._held[held.replica][held]
        self._hashes -= len(held.chain)
        for key in held.chain[1:]:
            _discard(self._by_hash, key, held)
        _discard(self._by_end, held.chain[-1], held)

    def _deepest(self, prefix: Prefix) -> int:
        """Return how many whole blocks the longest match has."""
        low, high = 0, len(prefix.chain) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if prefix.chain[middle] in self._by_hash:
                low = middle
            else:
                high = middle - 1
        return low


def _note(found: dict[str, Match], held: Held, length: int) -> None:
    known = found.get(held.replica)
    if length >= SHORTEST_MATCH and (known is None or length > known.length):
        found[held.replica] = Match(held, length)


def _rest(prefix: Prefix) -> tuple[int, ...]:
    return tuple(prefix.token_ids[(len(prefix.chain) - 1) * BLOCK :])


def _common(first: Iterable[int], second: Iterable[int]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _discard(places: dict[int, set[Held]], key: int, held: Held) -> None:
    places[key].discard(held)
    if not places[key]:
        del places[key]
