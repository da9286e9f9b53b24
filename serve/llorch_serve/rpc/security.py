"""Who may call a worker: TLS and mTLS by certificates, bearer tokens by comparison in constant time.

Input: files and tokens that the command line names. Output: the port's credentials, and an interceptor that
ends calls without a known token with UNAUTHENTICATED before any handler sees them and any message is
received. Health is exempt, so that probes need no secret.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc

from llorch_serve.calls.callers import TokenList
from llorch_serve.errors import UsageError
from llorch_serve.rpc import health
from llorch_serve.rpc.call_limit import Context
from llorch_serve.rpc.callers import metadata_token
from llorch_serve.rpc.sending import Sending

MAX_SECRET_BYTES: Final = 2**20
"""Largest file of tokens or certificates that is read."""

_HEALTH_PREFIX: Final = f"/{health.NAME}/"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate chain and its private key, both PEM."""

    chain: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Security:
    """What a worker asks of its callers.

    tokens: one of them must be shown; none: no token is asked for. certificate: the worker's own; None: no
        TLS.
    client_ca: PEM of whoever signs client certificates, which are then required.
    """

    tokens: tuple[str, ...] = field(default=(), repr=False)
    certificate: Certificate | None = None
    client_ca: bytes | None = None

    @property
    def knows_callers(self) -> bool:
        """Whether a call says whose it is."""
        return bool(self.tokens) or self.client_ca is not None

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Return the port's credentials; None without TLS."""
        if self.certificate is None:
            return None
        return grpc.ssl_server_credentials(
            [(self.certificate.key, self.certificate.chain)],
            root_certificates=self.client_ca,
            require_client_auth=self.client_ca is not None,
        )


OPEN: Final = Security()
"""Plain text, any caller."""


def load_security(
    *,
    token: str | None,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
) -> Security:
    """Read what the command line names. token: the value of LLORCH_API_TOKEN, None if it is not set.

    Raises UsageError for files that cannot be read or do not fit together, and for an empty token.
    """
    tokens: tuple[str, ...] = ()
    if token_file is not None:
        tokens = read_tokens(token_file)
    elif token is not None:
        tokens = (_checked(token, "LLORCH_API_TOKEN"),)
    certificate = load_certificate(tls_cert, tls_key)
    if tls_client_ca is None:
        return Security(tokens, certificate)
    if certificate is None:
        raise UsageError(
            "--tls-client-ca needs --tls-cert and --tls-key: callers show certificates over TLS only"
        )
    return Security(tokens, certificate, load_authority("--tls-client-ca", tls_client_ca))


def read_tokens(path: Path) -> tuple[str, ...]:
    """Return a file's tokens, one a line; each is a caller of its own. Raises UsageError."""
    lines = read_secret("--token-file", path).decode("utf-8", "replace").splitlines()
    tokens = tuple(_checked(line, f"--token-file {path}") for line in lines if line.strip())
    if not tokens:
        raise UsageError(f"--token-file {path} holds no token; write one a line, or leave the flag out")
    return tokens


def load_certificate(cert: Path | None, key: Path | None) -> Certificate | None:
    """Return a certificate and its key if both are named. Raises UsageError if one is, or if they do not
    belong together.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise UsageError("--tls-cert and --tls-key belong together; give both, or neither")
    found = Certificate(read_secret("--tls-cert", cert), read_secret("--tls-key", key))
    try:
        # gRPC itself says nothing about a bad pair until a client fails. No password: a key must not wait for
        # a person.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: b"")
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            f"--tls-cert {cert} and --tls-key {key} cannot be used together ({error}); expected PEM files "
            f"of a "
            "certificate and its unencrypted key"
        ) from error
    return found


def load_authority(flag: str, path: Path) -> bytes:
    """Return PEM of certificates to trust. Raises UsageError."""
    data = read_secret(flag, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path} holds no certificate ({error}); expected a PEM file") from error
    return data


def read_secret(flag: str, path: Path) -> bytes:
    """Return a small file's bytes. Raises UsageError."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_SECRET_BYTES:
        raise UsageError(
            f"{flag} {path} has more than {MAX_SECRET_BYTES} bytes; it is not what the flag expects"
        )
    return data


def _checked(token: str, origin: str) -> str:
    found = token.strip()
    if not found:
        raise UsageError(f"{origin} is empty, which would let everybody in; give a token, or leave it out")
    if not (found.isascii() and found.isprintable() and " " not in found):
        raise UsageError(
            f"{origin} holds a token that no header can carry; expected printable ASCII without spaces"
        )
    return found


def exposure(host: str, security: Security) -> str | None:
    """Return what is unsafe about listening there, as a phrase; None if nothing is."""
    if is_loopback(host):
        return None
    if not security.knows_callers:
        return f"anybody who reaches {host} can use this worker"
    if security.certificate is None:
        return f"tokens, prompts and answers cross the network to {host} in the clear"
    return None


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class TokenCheck(grpc.aio.ServerInterceptor):
    """Lets calls with a known bearer token through, and health checks."""

    def __init__(self, tokens: tuple[str, ...], sending: Sending) -> None:
        self._sending = sending
        # It reads nothing, so it does for methods of every shape.
        self._refusing: Handler = grpc.stream_stream_rpc_method_handler(self._refuse)
        self._tokens = TokenList(tokens)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's own handler, or one that refuses; None if there is no such method."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_HEALTH_PREFIX):
            return handler
        token = metadata_token(handler_call_details.invocation_metadata)
        shown = None if token is None else token.encode("utf-8", "surrogateescape")
        return handler if self._tokens.accepts(shown) else self._refusing

    async def _refuse(self, _requests: object, context: Context) -> None:
        refusal = context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            "this worker asks for a bearer token; send the metadata authorization: Bearer TOKEN",
        )
        await self._sending.send(context, refusal)
