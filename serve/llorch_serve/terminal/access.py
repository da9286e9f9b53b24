"""How ``--connect`` reaches a worker that asks for TLS or a token: the flags, and what they make."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from llorch_serve.errors import UsageError

if TYPE_CHECKING:
    from llorch_serve.client.channel import Access

TOKEN_VARIABLE: Final = "LLORCH_API_TOKEN"  # noqa: S105 - the variable's name

Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar=TOKEN_VARIABLE,
        help="With --connect: bearer token; better set in the variable, which no process list shows.",
        show_default=False,
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        help="With --connect: use TLS and trust the certificates in this PEM file.",
        show_default=False,
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        help="With --connect: a client certificate for mTLS, PEM.",
        show_default=False,
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(
        "--tls-key", metavar="FILE", help="With --connect: its private key, PEM.", show_default=False
    ),
]


def read_access(
    token: str | None, tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None
) -> Access:
    """Return how to reach a worker. Raises UsageError for files that cannot be used, and an impossible
    token.
    """
    from llorch_serve.client.channel import Access
    from llorch_serve.rpc.security import load_authority, load_certificate

    if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
        raise UsageError("--token holds no token that a header can carry; expected printable ASCII")
    certificate = load_certificate(tls_cert, tls_key)
    ca = None if tls_ca is None else load_authority("--tls-ca", tls_ca)
    return Access(
        token=None if token is None else token.strip(),
        tls=ca is not None or certificate is not None,
        ca=ca,
        chain=None if certificate is None else certificate.chain,
        key=None if certificate is None else certificate.key,
    )


def refuse_access(
    token: str | None, tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None
) -> None:
    """Raise UsageError for any of the flags where there is no worker to reach; the variable may be set."""
    flags: dict[str, object] = {"--tls-ca": tls_ca, "--tls-cert": tls_cert, "--tls-key": tls_key}
    if token != os.environ.get(TOKEN_VARIABLE):
        flags["--token"] = token
    for name, value in flags.items():
        if value is not None:
            raise UsageError(f"{name} has no effect without --connect; leave it out")
