"""Flags that name a running worker and what it asks for, and the connection that they make."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from llorch_serve.errors import UsageError
from llorch_serve.terminal.groups import FlagGroup

if TYPE_CHECKING:
    from llorch_serve.client.blocking import WorkerClient
    from llorch_serve.client.channel import Access

TOKEN_VARIABLE: Final = "LLORCH_API_TOKEN"  # noqa: S105 - the variable's name


class WorkerFlags(FlagGroup, frozen=True):
    """A running worker instead of a model in this process."""

    connect: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Use a running worker instead.", show_default=False),
    ] = None
    wait: Annotated[
        float | None,
        typer.Option(
            min=0, help="With --connect: seconds to wait for a starting worker.", show_default=False
        ),
    ] = None
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar=TOKEN_VARIABLE,
            help="With --connect: bearer token; better set in the variable, which no process list shows.",
            show_default=False,
        ),
    ] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca",
            metavar="FILE",
            help="With --connect: use TLS and trust the certificates in this PEM file.",
            show_default=False,
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert",
            metavar="FILE",
            help="With --connect: a client certificate for mTLS, PEM.",
            show_default=False,
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(
            "--tls-key", metavar="FILE", help="With --connect: its private key, PEM.", show_default=False
        ),
    ] = None

    def access(self) -> Access:
        """Return how the worker is reached. Raises UsageError, see :func:`read_access`."""
        return read_access(self.token, self.tls_ca, self.tls_cert, self.tls_key)

    def refuse(self) -> None:
        """Raise UsageError for any of the flags where there is no worker; the token's variable may be set."""
        from_variable = self.token == os.environ.get(TOKEN_VARIABLE)
        for flag in self.given():
            if flag != "--token" or not from_variable:
                raise UsageError(f"{flag} has no effect without --connect; leave it out")


@contextlib.contextmanager
def connected(address: str, access: Access, wait: float | None) -> Iterator[WorkerClient]:
    """Give a client of the worker at ``address``, once it is ready if there are seconds to wait for that.

    Raises WorkerError and UnavailableError, see
    :meth:`llorch_serve.client.blocking.WorkerClient.wait_until_ready`.
    """
    from llorch_serve.client.blocking import WorkerClient

    with WorkerClient(address, access) as client:
        if wait:
            client.wait_until_ready(wait)
        yield client


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


def refuse_local_flags(address: str, given: list[str]) -> None:
    """Raise UsageError for flags that were set and mean nothing to a worker that runs elsewhere."""
    for flag in given:
        raise UsageError(f"{flag} has no effect on the worker at {address}; leave it out")
