"""Requests of a benchmark over HTTP, against servers that answer with fixed bytes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

import pytest

from llorch_serve.bench.serving.over_http import HttpCall, fetch_model_info
from llorch_serve.bench.serving.records import CallError, Piece, Usage
from llorch_serve.bench.serving.wire import HttpAddress, read_address
from llorch_serve.bench.serving.work import Job
from llorch_serve.errors import UsageError, WorkerError
from llorch_serve.requests import TextPrompt
from support.builders.certificates import make_certificates

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
JOB = Job(TextPrompt("Once"), 4)
Text = '{"choices": [{"index": 0, "text": "%s", "finish_reason": null}], "usage": null}'
LAST = '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}}'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def whole(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d Word\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def answered(*parts: bytes, do: Callable[[HttpAddress], object], tls: ssl.SSLContext | None = None):
    """Return what ``do(address)`` gives with a server that writes ``parts`` to whoever asks, and the
    request's bytes.
    """
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        asked.append(head + await reader.readexactly(length))
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.close()

    async def run() -> object:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
        async with server:
            return await do(HttpAddress("127.0.0.1", server.sockets[0].getsockname()[1]))  # type: ignore[misc]

    return asyncio.run(run()), asked


async def pieces(address: HttpAddress) -> tuple[list[Piece], CallError | None]:
    found = []
    try:
        async for piece in HttpCall(address, "m")(JOB):
            found.append(piece)  # noqa: PERF401 - what came before an error is kept
    except CallError as error:
        return found, error
    return found, None


def test_chunks_are_messages_however_the_bytes_are_cut():
    body = event(Text % "a") + event(Text % "") + event(Text % "bc") + event(LAST) + event("[DONE]")
    for size in (1, 7, 10_000):
        parts = [chunk(body[i : i + size]) for i in range(0, len(body), size)]
        (found, error), asked = answered(HEAD, *parts, chunk(b""), do=pieces)
        assert error is None
        assert found == [Piece(None), Piece(0), Piece(None), Piece(0, Usage(3, 2, 4))]
    assert asked[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")
    for field in (
        b'"prompt":"Once"',
        b'"max_tokens":4',
        b'"ignore_eos":true',
        b'"include_usage":true',
        b'"model":"m"',
    ):
        assert field in asked[0]


def test_parts_of_a_chat_that_the_model_said_count():
    deltas = (
        '{"role": "assistant", "content": ""}',
        '{"content": "a"}',
        '{"reasoning_content": "b"}',
        '{"tool_calls": [{}]}',
        "{}",
    )
    body = b"".join(event('{"choices": [{"delta": ' + delta + "}]}") for delta in deltas)
    (found, _), _ = answered(HEAD, chunk(body), chunk(b""), do=pieces)
    assert [piece.tokens for piece in found] == [0, None, None, None, 0]


@pytest.mark.parametrize(
    ("parts", "status", "before", "words"),
    [
        ((HEAD, chunk(event(Text % "a"))), "CONNECTION", 1, "127.0.0.1"),
        ((b"",), "CONNECTION", 0, "127.0.0.1"),
        ((b"nonsense\r\n\r\n",), "CONNECTION", 0, "127.0.0.1"),
        ((HEAD, chunk(event("{")), chunk(b"")), "MALFORMED", 0, "OpenAI"),
        (
            (
                HEAD,
                chunk(event(Text % "a") + event('{"error": {"message": "bad luck", "code": "unlucky"}}')),
                chunk(b""),
            ),
            "unlucky",
            1,
            "bad luck",
        ),
        ((whole(503, b"wait"),), "HTTP 503", 0, "wait"),
        ((whole(429, b'{"error": {"message": "queue full"}}'),), "HTTP 429", 0, "queue full"),
    ],
)
def test_failures_have_a_status(parts: tuple[bytes, ...], status: str, before: int, words: str):
    (found, error), _ = answered(*parts, do=pieces)
    assert error is not None
    assert (error.status, len(found)) == (status, before)
    assert words in str(error)


def test_a_stream_that_ends_without_usage_is_left_to_the_record():
    (found, error), _ = answered(HEAD, chunk(event(Text % "a") + event("[DONE]")), chunk(b""), do=pieces)
    assert (found, error) == ([Piece(None)], None)


def test_a_token_is_sent_with_every_request():
    async def do(address: HttpAddress) -> None:
        with pytest.raises(WorkerError):
            await fetch_model_info(HttpAddress(address.host, address.port, token="secret"))

    _, asked = answered(whole(401, b""), do=do)
    assert b"authorization: bearer secret" in asked[0].lower()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b'{"data": [{"id": "gpt"}]}', "expected the front of llorch serve --http"),
        (b"<html>", "expected the front of llorch serve --http"),
    ],
)
def test_other_servers_are_refused(answer: bytes, words: str):
    async def do(address: HttpAddress) -> str:
        with pytest.raises(WorkerError) as caught:
            await fetch_model_info(address)
        return str(caught.value)

    assert words in answered(whole(200, answer), do=do)[0]


def test_addresses():
    assert read_address("http://10.0.0.1:8080") == HttpAddress("10.0.0.1", 8080)
    assert read_address("http://worker/v1/", token="t") == HttpAddress("worker", 80, token="t")
    assert str(read_address("http://[::1]:8080")) == "http://[::1]:8080"
    secure = read_address("https://worker")
    assert (secure.port, str(secure)) == (443, "https://worker:443")
    assert secure.tls is not None
    assert secure.tls.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    "value",
    ["http://", "http://host:port", "http://host/v2", "http://host?x=1", "http://me@host", "grpc://host"],
)
def test_other_addresses_are_refused(value: str):
    with pytest.raises(UsageError, match=r"http://127\.0\.0\.1:8080"):
        read_address(value)


def test_an_authority_is_for_https(tmp_path):
    ca = make_certificates(tmp_path).ca.read_bytes()
    assert read_address("https://worker", ca=ca).tls is not None
    with pytest.raises(UsageError, match="--tls-ca has no effect over http://"):
        read_address("http://worker", ca=ca)
