"""Who is calling: what a connection's certificate or a call's bearer token says about it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import grpc


def bearer_token(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """Return the token of ``authorization: Bearer TOKEN``, or None if there is none."""
    for key, value in metadata or ():
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            if scheme.lower() == "bearer" and token:
                return token.strip()
    return None


def holder_of(certificate: bytes) -> str:
    """Return a name for the holder of a client certificate, given as PEM."""
    return "certificate:" + hashlib.sha256(certificate).hexdigest()[:16]


def caller_of(context: grpc.aio.ServicerContext[Any, Any], *, by_token: bool) -> str:
    """Return a name for the caller, the same for every call of its own; empty if the worker cannot tell
    callers apart.

    A client certificate names its holder, else a token does, if the worker checks tokens (``by_token``). The
    name is a digest, fit to be logged.
    """
    certificate = context.auth_context().get("x509_pem_cert", ())
    if certificate:
        return holder_of(b"".join(certificate))
    token = bearer_token(context.invocation_metadata()) if by_token else None
    return "" if token is None else "token:" + hashlib.sha256(token.encode()).hexdigest()[:16]
