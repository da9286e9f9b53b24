"""Who is calling over gRPC: what a connection's certificate or a call's metadata says about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from llorch_serve.calls.callers import Caller, bearer_token, name_of_certificate, name_of_token
from llorch_serve.calls.correlation import read_ids

Metadata = Iterable[tuple[str, str | bytes]]


def metadata_token(metadata: Metadata | None) -> str | None:
    """Return the token of ``authorization: Bearer TOKEN``, or None if there is none."""
    for key, value in metadata or ():
        if key == "authorization" and isinstance(value, str):
            token = bearer_token(value)
            if token is not None:
                return token
    return None


def caller_of(context: grpc.aio.ServicerContext[Any, Any], *, by_token: bool) -> Caller:
    """Return who sent a call.

    A client certificate names its holder, else a token does, if the worker checks tokens (``by_token``); the
    owner is empty if the worker cannot tell callers apart.
    """
    metadata = context.invocation_metadata()
    ids = read_ids(metadata)
    return Caller(_owner(context, metadata, by_token), context.peer(), ids.correlation_id, ids.traceparent)


def _owner(context: grpc.aio.ServicerContext[Any, Any], metadata: Metadata | None, by_token: bool) -> str:
    certificate = context.auth_context().get("x509_pem_cert", ())
    if certificate:
        return name_of_certificate(b"".join(certificate))
    token = metadata_token(metadata) if by_token else None
    return "" if token is None else name_of_token(token.encode())
