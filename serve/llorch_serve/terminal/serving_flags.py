"""Arguments of ``llorch serve`` alone (limits, secrets, the pool manager, the end), and what must be true of
them together.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_serve.config import CacheSharing
from llorch_serve.engine.waiting import DEFAULT_MOST_TOKENS
from llorch_serve.errors import UsageError
from llorch_serve.terminal.console import say
from llorch_serve.terminal.flags import read_size

if TYPE_CHECKING:
    from llorch_serve.pool.reporter import PoolConfig
    from llorch_serve.rpc.security import Security

MaxQueuedRequests = Annotated[
    int,
    typer.Option(min=1, help="Requests that may wait for a slot; more are refused with RESOURCE_EXHAUSTED."),
]
MaxQueuedTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens that waiting prompts may have together; one request may always wait. "
        f"Default: as many as the KV cache may hold, at least {DEFAULT_MOST_TOKENS}.",
        show_default=False,
    ),
]
CacheSharingFlag = Annotated[
    CacheSharing,
    typer.Option(
        "--cache-sharing",
        help="Whose requests share cached prefixes and compiled grammars: each caller's its own (all, where "
        "callers are not "
        "known by token or certificate), each client_id's (else each connection's), or everybody's.",
    ),
]
MaxMessageBytes = Annotated[
    str, typer.Option(metavar="SIZE", help="Largest message taken or sent, like 16MiB.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Bearer tokens, one a line and caller; calls must show one. The variable LLORCH_API_TOKEN names "
        "a single one.",
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
        help="Refuse to start where callers are not known, or beyond loopback without TLS, instead of "
        "warning.",
    ),
]
StreamInterval = Annotated[
    str,
    typer.Option(
        metavar="auto|N",
        help="Tokens that each message of a stream waits for, but the first and the last. auto: all streams "
        "together get "
        "80 messages a second, which cost the model little of its time, and no token waits for over 0.1 s.",
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


def judge_exposure(host: str, security: Security, *, require_auth: bool) -> None:
    """Say what is unsafe about the address; with ``require_auth`` raise UsageError for it."""
    from llorch_serve.rpc.security import exposure

    how = "set LLORCH_API_TOKEN or --token-file, and --tls-cert with --tls-key; or --tls-client-ca"
    unsafe = exposure(host, security)
    if require_auth and (unsafe is not None or not security.knows_callers):
        raise UsageError(f"--require-auth is set, and {unsafe or 'callers need not say who they are'}; {how}")
    if unsafe is not None:
        say(f"warning: {unsafe}; {how}")


def read_pool(
    worker_id: str | None,
    callback_url: str | None,
    advertise_host: str | None,
    model_ref: str | None,
    *,
    host: str,
    security: Security,
) -> PoolConfig | None:
    """Return whom to tell about this worker, or None. Raises UsageError for flags that do not go together."""
    from llorch_serve.pool.post import read_url
    from llorch_serve.pool.reporter import PoolConfig

    if callback_url is None:
        flags = {"--worker-id": worker_id, "--advertise-host": advertise_host, "--model-ref": model_ref}
        for name, value in flags.items():
            if value is not None:
                raise UsageError(f"{name} has no effect without --callback-url; leave it out")
        return None
    if not worker_id:
        raise UsageError("--callback-url needs --worker-id, the name by which the manager knows this worker")
    if advertise_host is None and host in ("0.0.0.0", "::", ""):  # noqa: S104 - compared, not bound
        raise UsageError(f"--host {host} is no address to call; give --advertise-host with --callback-url")
    return PoolConfig(
        worker_id=worker_id,
        url=read_url(callback_url),
        host=advertise_host or host,
        secure=security.certificate is not None,
        model_ref=model_ref,
    )


def read_stream_interval(value: str) -> int | None:
    """Return the tokens that ``--stream-interval`` stands for, None for ``auto``. Raises UsageError."""
    if value == "auto":
        return None
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= 1024:
        raise UsageError(f"--stream-interval is {value}; expected auto or 1 to 1024")
    return int(value)


def read_message_bytes(value: str) -> int:
    """Return the bytes that ``--max-message-bytes`` stands for. Raises UsageError."""
    size = read_size("--max-message-bytes", value)
    assert size is not None
    if not 1024 <= size < 2**31:
        raise UsageError(f"--max-message-bytes is {value}; expected 1KiB to less than 2GiB")
    return size
