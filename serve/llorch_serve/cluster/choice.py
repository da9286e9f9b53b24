"""Which replica answers a request: the one that need not compute most of its prompt, unless that is too busy.

Input: the replicas as a front sees them, what the prefix index knows, and what the request asks for. Output:
the replica to ask, and one to ask in its place. Nothing of Ray's is needed for it: ``router.py`` asks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from llorch_serve.cluster.interfaces import RoutingHint
from llorch_serve.cluster.prefix_index import SHORTEST_MATCH, Match, Prefix, PrefixIndex


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica.

    ongoing: requests that it has, those that wait for a slot too. most: of them it takes. fingerprint: of its
    model; empty: not known.
    """

    replica: str
    ongoing: int
    slots: int
    most: int
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """slack: how many requests more than the idlest a replica may have that holds more of the prompt. None:
    half its slots, at least one.
    """

    slack: int | None = None

    def slack_of(self, candidate: Candidate) -> int:
        """Return the slack of a replica."""
        return max(1, candidate.slots // 2) if self.slack is None else self.slack


def choose(
    candidates: Sequence[Candidate], hint: RoutingHint, index: PrefixIndex, rules: Rules
) -> tuple[str, ...]:
    """Return the replica for a request, then the idlest other one; nothing if no replica may take it now.

    A match that would cost another prompt more tokens than it saves counts as none. Among equals the idlest
    wins, then the session decides, then who holds the prompt that was not used for longest.
    """
    allowed = [
        one
        for one in candidates
        if one.ongoing < one.most
        and one.replica not in hint.avoid
        and (not hint.fingerprint or one.fingerprint in ("", hint.fingerprint))
    ]
    if not allowed:
        return ()
    idlest = min(one.ongoing for one in allowed)
    close = [one for one in allowed if one.ongoing - idlest <= rules.slack_of(one)]
    best = _best(close, hint, index)
    others = [one for one in allowed if one is not best]
    if not others:
        return (best.replica,)
    return best.replica, min(others, key=lambda one: (one.ongoing, one.replica)).replica


def _best(close: Sequence[Candidate], hint: RoutingHint, index: PrefixIndex) -> Candidate:
    gains = _gains(close, hint.prefix, index)
    most = max(gains.values(), default=0)
    equals = [one for one in close if gains.get(one.replica, 0) == most]
    idlest = min(one.ongoing for one in equals)

    prompt = "" if hint.prefix is None else str(hint.prefix.chain[-1])

    def order(one: Candidate) -> tuple[int, int, int]:
        drawn = 0 if hint.session is None else _draw(hint.session, one.replica)
        # In the end by chance, so that fronts that know nothing of each other do not all choose the same.
        return drawn, index.last_use(one.replica), _draw(prompt, one.replica)

    return min((one for one in equals if one.ongoing == idlest), key=order)


def _gains(close: Sequence[Candidate], prefix: Prefix | None, index: PrefixIndex) -> dict[str, int]:
    """Return the tokens that each replica saves, less those of a prompt that it would lose for it.

    What all replicas together would have given up first costs nothing.
    """
    if prefix is None:
        return {}
    matches = index.matches(prefix)
    if not matches:
        return {}
    forgettable = min(index.last_use(one.replica) for one in close)
    gains = {}
    for one in close:
        match = matches.get(one.replica)
        if match is not None:
            gains[one.replica] = max(0, match.length - _loss(one.replica, match, index, forgettable))
    return gains


def _loss(replica: str, match: Match, index: PrefixIndex, forgettable: int) -> int:
    displaced = index.displaced(replica, match)
    if displaced is None or displaced.used <= forgettable:
        return 0
    goes_on = displaced is match.held and displaced.length - match.length < SHORTEST_MATCH
    return 0 if goes_on else displaced.length


def _draw(what: str, replica: str) -> int:
    """Return a number that is the same in every front, and by which another replica is first for something
    else.
    """
    digest = hashlib.blake2b(f"{what}\n{replica}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)
