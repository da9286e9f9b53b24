"""Who is calling: names for callers, and the tokens that they must show.

A name is the same for every call of a caller. It is a digest, so that logs may hold it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """What has an answer be the same bytes whenever it is asked for, as lines of a file are.

    name: 24 hexadecimal digits, of which its ids are made. created: the time that it tells, in seconds since
        1970; None: the clock's. seed: of sampling, where the request names none.
    """

    name: str
    created: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    owner: who it is, where the worker knows its callers; else empty. client: for fairness among those who
        give no client id of their own.
    correlation_id, traceparent: of the caller's records and trace.
    identity: of the answer, where the caller decides on it; else None.
    """

    owner: str
    client: str
    correlation_id: str
    traceparent: str = ""
    identity: AnswerIdentity | None = None

    def answer_id(self, prefix: str) -> str:
        """Return an id for the answer that no other has: the prefix and 24 hexadecimal digits."""
        return prefix + (secrets.token_hex(12) if self.identity is None else self.identity.name)

    def now(self) -> float:
        """Return the time that the answer tells, in seconds since 1970."""
        fixed = None if self.identity is None else self.identity.created
        return time.time() if fixed is None else fixed


class TokenList:
    """Tokens of which a caller must show one. Compared in constant time, by their digests."""

    def __init__(self, tokens: tuple[str, ...]) -> None:
        # Digests are of one length, so that a comparison tells nothing about that of a token either.
        self._digests = tuple(_digest(token.encode()) for token in tokens)

    def accepts(self, shown: bytes | None) -> bool:
        """Tell whether it is one of the tokens; None: nothing was shown."""
        digest, accepted = _digest(shown or b""), False
        for known in self._digests:  # all of them, so that the time does not tell which one it was
            accepted |= hmac.compare_digest(digest, known)
        return accepted and shown is not None


def bearer_token(header: str | None) -> str | None:
    """Return the token of ``Bearer TOKEN``, an Authorization header's value; None if there is none."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token else None


def name_of_token(token: bytes) -> str:
    """Return a name for whoever shows a token."""
    return f"token:{_digest(token)[:16]}"


def name_of_certificate(certificate: bytes) -> str:
    """Return a name for the holder of a client certificate, given as PEM."""
    return f"certificate:{_digest(certificate)[:16]}"


def _digest(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()
