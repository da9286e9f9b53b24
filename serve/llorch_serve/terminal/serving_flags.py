"""Arguments of ``llorch serve`` alone: limits, secrets, the pool manager, the end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MaxQueuedRequests = Annotated[
    int,
    typer.Option(min=1, help="Requests that may wait for a slot; more are refused with RESOURCE_EXHAUSTED."),
]
MaxQueuedTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens that waiting prompts may have together; one prompt may always wait. Default: any number.",
        show_default=False,
    ),
]
MaxMessageBytes = Annotated[
    str, typer.Option(metavar="SIZE", help="Largest message taken or sent, like 16MiB.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Bearer tokens, one a line and caller; calls must show one. The variable LLORCH_API_TOKEN names a single one.",
        show_default=False,
    ),
]
ServerCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        help="The worker's certificate chain, PEM: serve TLS.",
        show_default=False,
    ),
]
ServerKey = Annotated[
    Path | None,
    typer.Option("--tls-key", metavar="FILE", help="Its private key, PEM, unencrypted.", show_default=False),
]
ClientCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-client-ca",
        metavar="FILE",
        help="mTLS: callers must show a certificate signed by one of these, PEM.",
        show_default=False,
    ),
]
RequireAuth = Annotated[
    bool,
    typer.Option(
        "--require-auth/--no-require-auth",
        help="Refuse to start where callers are not known, or beyond loopback without TLS, instead of warning.",
    ),
]
PreloadOnly = Annotated[
    bool,
    typer.Option(
        "--preload-only/--no-preload-only",
        help="Load and warm up as for serving, say what came of it, and exit; no port is opened.",
    ),
]
IdleTimeout = Annotated[
    float | None,
    typer.Option(min=0.001, metavar="SECONDS", help="Stop after so long without a call.", show_default=False),
]
WorkerId = Annotated[
    str | None, typer.Option(help="This worker's name at the pool manager.", show_default=False)
]
CallbackUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="A pool manager, told when the worker is ready and every 30 s how it is.",
        show_default=False,
    ),
]
AdvertiseHost = Annotated[
    str | None,
    typer.Option(
        help="Host by which the pool manager's clients reach this worker. Default: --host.",
        show_default=False,
    ),
]
ModelRef = Annotated[
    str | None,
    typer.Option(help="The pool manager's name for the model. Default: the model's id.", show_default=False),
]
