"""One HTTP/1.1 request and its answer, event by event: h11 knows the protocol, asyncio has the connection.

Input: an address like http://127.0.0.1:8080. Output: the answer's status, then its body's parts or
server-sent events as they come. Every request has a connection of its own.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

from llorch_serve.bench.serving.records import CallError
from llorch_serve.errors import UsageError

CONNECTION = "CONNECTION"
"""The status of a request whose connection could not be made, or broke."""

_READ_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Where HTTP is served. tls: how certificates are checked; None: plain HTTP. token: sent with every
    request.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    token: str | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls is None else 'https'}://{host}:{self.port}"


def read_address(value: str, *, ca: bytes | None = None, token: str | None = None) -> HttpAddress:
    """Return where ``http://HOST:PORT`` leads; ``/v1`` behind it is what OpenAI's clients are given. Raises
    UsageError.
    """
    expected = "expected one like http://127.0.0.1:8080"
    try:
        parts = urlsplit(value)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"--connect is {value!r} ({error}); {expected}") from error
    if parts.scheme not in ("http", "https"):
        raise UsageError(f"--connect is {value!r}; {expected}")
    if not host or parts.path.rstrip("/") not in ("", "/v1") or parts.query or parts.username is not None:
        raise UsageError(f"--connect is {value!r}; {expected}")
    if parts.scheme == "http" and ca is not None:
        raise UsageError("--tls-ca has no effect over http://; leave it out, or connect to https://")
    if parts.scheme == "http":
        return HttpAddress(host, port or 80, token=token)
    context = ssl.create_default_context(cadata=None if ca is None else ca.decode("ascii"))
    return HttpAddress(host, port or 443, context, token)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer that has begun. parts: its body's bytes as they come; raises CallError if they end early."""

    status: int
    parts: AsyncGenerator[bytes]

    async def body(self) -> bytes:
        """Return the whole body."""
        return b"".join([part async for part in self.parts])

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the data of each server-sent event of one line, as llorch's front writes them."""
        held = b""
        async for part in self.parts:
            *events, held = (held + part).split(b"\n\n")
            for event in events:
                yield event.removeprefix(b"data: ")


@asynccontextmanager
async def request(
    address: HttpAddress, method: str, path: str, body: bytes = b""
) -> AsyncGenerator[HttpAnswer]:
    """Send a request and yield its answer, whose connection closes with the context. Raises CallError."""
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=address.tls)
        http = h11.Connection(h11.CLIENT)
        headers = [("Host", f"{address.host}:{address.port}"), ("Content-Length", str(len(body)))]
        headers += [("Content-Type", "application/json")] if body else []
        headers += [("Authorization", f"Bearer {address.token}")] if address.token else []
        events = (
            h11.Request(method=method, target=path, headers=headers),
            *((h11.Data(data=body),) if body else ()),
            h11.EndOfMessage(),
        )
        writer.write(b"".join(http.send(event) or b"" for event in events))
        await writer.drain()
        head = await _next(http, reader)
        while isinstance(head, h11.InformationalResponse):
            head = await _next(http, reader)
        assert isinstance(head, h11.Response)
        async with aclosing(_parts(http, reader)) as parts:
            yield HttpAnswer(head.status_code, parts)
    except (OSError, h11.ProtocolError) as error:
        raise CallError(CONNECTION, f"{address}: {str(error) or type(error).__name__}") from error
    finally:
        if writer is not None:
            writer.transport.abort()  # nothing more is expected, not even TLS's goodbye
            with suppress(OSError):
                await writer.wait_closed()


async def _parts(http: h11.Connection, reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    while isinstance(event := await _next(http, reader), h11.Data):
        yield bytes(event.data)


async def _next(http: h11.Connection, reader: asyncio.StreamReader) -> h11.Event:
    """Return the next event. h11 raises RemoteProtocolError where the connection ends before the answer
    does.
    """
    while not isinstance(event := http.next_event(), h11.Event):
        http.receive_data(await reader.read(_READ_BYTES))
    return event
