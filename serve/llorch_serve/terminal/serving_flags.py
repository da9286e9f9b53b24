"""Flags of ``llorch serve`` alone: where it listens, its limits, its pool manager, its end and its log."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_serve.config import CacheSharing, EngineConfig, read_names, read_size
from llorch_serve.engine.waiting import DEFAULT_MOST_TOKENS
from llorch_serve.errors import UsageError
from llorch_serve.observe.logs import LogFormat, LogLevel, set_up_logging
from llorch_serve.terminal.groups import FlagGroup

if TYPE_CHECKING:
    from llorch_serve.pool.reporter import PoolConfig
    from llorch_serve.rpc.security import Security


class ListenFlags(FlagGroup, frozen=True):
    """Where the worker listens."""

    host: Annotated[str, typer.Option(help="Address to listen on; loopback by default.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one, which is printed.")] = (
        50051
    )


class NameFlags(FlagGroup, frozen=True):
    """What clients call the model."""

    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="What clients may call the model beside its own id, as gpt-4o-mini; may be repeated. "
            "Answers tell the name that was asked for, else the first.",
            show_default=False,
        ),
    ] = None

    def add_to(self, config: EngineConfig) -> EngineConfig:
        """Return the settings of an engine, with these names. Raises UsageError for one that is empty, or
        long.
        """
        return replace(config, served_names=read_names("--served-model-name", self.served_model_name or ()))


class QueueFlags(FlagGroup, frozen=True):
    """What may wait for a slot, and with whom it shares the cache."""

    max_queued_requests: Annotated[
        int,
        typer.Option(
            min=1, help="Requests that may wait for a slot; more are refused with RESOURCE_EXHAUSTED."
        ),
    ] = 1024
    max_queued_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that waiting prompts may have together; one request may always wait. "
            f"Default: as many as the KV cache may hold, at least {DEFAULT_MOST_TOKENS}.",
            show_default=False,
        ),
    ] = None
    cache_sharing: Annotated[
        CacheSharing,
        typer.Option(
            "--cache-sharing",
            help="Whose requests share cached prefixes and compiled grammars: each caller's its own (all, "
            "where callers are not known by token or certificate), each client_id's (else each "
            "connection's), or everybody's.",
        ),
    ] = CacheSharing.CALLER

    def add_to(self, config: EngineConfig) -> EngineConfig:
        """Return the settings of an engine, with these flags."""
        return replace(
            config,
            max_waiting=self.max_queued_requests,
            max_waiting_tokens=self.max_queued_tokens,
            cache_sharing=self.cache_sharing,
        )


class MessageFlags(FlagGroup, frozen=True):
    """How large messages are, and how many tokens one of a stream waits for."""

    max_message_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest message taken or sent, like 16MiB.")
    ] = "16MiB"
    stream_interval: Annotated[
        str,
        typer.Option(
            metavar="auto|N",
            help="Tokens that each message of a stream waits for, but the first and the last. auto: all "
            "streams together get 80 messages a second, which cost the model little of its time, and no "
            "token waits for over 0.1 s.",
        ),
    ] = "auto"


class PoolFlags(FlagGroup, frozen=True):
    """The pool manager that is told how this worker is."""

    worker_id: Annotated[
        str | None, typer.Option(help="This worker's name at the pool manager.", show_default=False)
    ] = None
    callback_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A pool manager, told when the worker is ready and every 30 s how it is.",
            show_default=False,
        ),
    ] = None
    advertise_host: Annotated[
        str | None,
        typer.Option(
            help="Host by which the pool manager's clients reach this worker. Default: --host.",
            show_default=False,
        ),
    ] = None
    model_ref: Annotated[
        str | None,
        typer.Option(
            help="The pool manager's name for the model. Default: the model's id.", show_default=False
        ),
    ] = None

    def read(self, host: str, security: Security) -> PoolConfig | None:
        """Return whom to tell about this worker, or None. Raises UsageError for flags that do not go
        together.
        """
        from llorch_serve.pool.post import read_url
        from llorch_serve.pool.reporter import PoolConfig

        if self.callback_url is None:
            for flag in self.given():
                raise UsageError(f"{flag} has no effect without --callback-url; leave it out")
            return None
        if not self.worker_id:
            raise UsageError(
                "--callback-url needs --worker-id, the name by which the manager knows this worker"
            )
        if self.advertise_host is None and host in ("0.0.0.0", "::", ""):  # noqa: S104 - compared, not bound
            raise UsageError(
                f"--host {host} is no address to call; give --advertise-host with --callback-url"
            )
        return PoolConfig(
            worker_id=self.worker_id,
            url=read_url(self.callback_url),
            host=self.advertise_host or host,
            secure=security.certificate is not None,
            model_ref=self.model_ref,
        )


class ShutdownFlags(FlagGroup, frozen=True):
    """When the worker stops, and how long running requests then have."""

    idle_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.001, metavar="SECONDS", help="Stop after so long without a call.", show_default=False
        ),
    ] = None
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests may take to finish after SIGTERM.")
    ] = 30.0


class FrontFlags(FlagGroup, frozen=True):
    """What the worker offers besides gRPC: an HTTP front and traces."""

    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="HOST:PORT",
            envvar="LLORCH_HTTP",
            help="Serve HTTP too: OpenAI's routes, /health, /metrics and a page. A port alone means the "
            "loopback. Needs the extra http.",
            show_default=False,
        ),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            "--otlp-endpoint",
            metavar="URL",
            envvar="LLORCH_OTLP_ENDPOINT",
            help="Send a span of each request over OTLP/HTTP, like http://127.0.0.1:4318. Needs the extra "
            "otel.",
            show_default=False,
        ),
    ] = None


class LogFlags(FlagGroup, frozen=True):
    """The log on stderr."""

    log_format: Annotated[
        LogFormat,
        typer.Option("--log-format", envvar="LLORCH_LOG_FORMAT", help="How log lines on stderr look."),
    ] = LogFormat.TEXT
    log_level: Annotated[
        LogLevel,
        typer.Option("--log-level", envvar="LLORCH_LOG_LEVEL", help="What is logged, and what is graver."),
    ] = LogLevel.INFO

    def set_up(self, secrets: tuple[str, ...] = ()) -> None:
        """Let the process log so. secrets: texts that no line may hold."""
        set_up_logging(self.log_format, self.log_level, secrets)


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
