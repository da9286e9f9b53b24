"""Flags of ``llorch serve`` that say who may call, and what is unsafe about an address without them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_serve.errors import UsageError
from llorch_serve.terminal.access import TOKEN_VARIABLE
from llorch_serve.terminal.console import say
from llorch_serve.terminal.groups import FlagGroup

if TYPE_CHECKING:
    from llorch_serve.rpc.security import Security


class SecurityFlags(FlagGroup, frozen=True):
    """Who may call, and how the connection is kept private."""

    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Bearer tokens, one a line and caller; calls must show one. The variable LLORCH_API_TOKEN "
            "names a single one.",
            show_default=False,
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert",
            metavar="FILE",
            help="The worker's certificate chain, PEM: serve TLS.",
            show_default=False,
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(
            "--tls-key", metavar="FILE", help="Its private key, PEM, unencrypted.", show_default=False
        ),
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-client-ca",
            metavar="FILE",
            help="mTLS: callers must show a certificate signed by one of these, PEM.",
            show_default=False,
        ),
    ] = None
    require_auth: Annotated[
        bool,
        typer.Option(
            "--require-auth/--no-require-auth",
            help="Refuse to start where callers are not known, or beyond loopback without TLS, instead of "
            "warning.",
        ),
    ] = False

    def load(self) -> Security:
        """Read the files and the token's variable. Raises UsageError for what cannot be used."""
        from llorch_serve.rpc.security import load_security

        return load_security(
            token=os.environ.get(TOKEN_VARIABLE),
            token_file=self.token_file,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            tls_client_ca=self.tls_client_ca,
        )


def judge_exposure(host: str, security: Security, *, require_auth: bool) -> None:
    """Say what is unsafe about the address; with ``require_auth`` raise UsageError for it."""
    from llorch_serve.rpc.security import exposure

    how = "set LLORCH_API_TOKEN or --token-file, and --tls-cert with --tls-key; or --tls-client-ca"
    unsafe = exposure(host, security)
    if require_auth and (unsafe is not None or not security.knows_callers):
        raise UsageError(f"--require-auth is set, and {unsafe or 'callers need not say who they are'}; {how}")
    if unsafe is not None:
        say(f"warning: {unsafe}; {how}")
