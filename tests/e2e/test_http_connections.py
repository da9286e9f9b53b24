"""Every connection ends: whatever a client leaves undone, a timer runs; and their number and their bodies are
bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import ssl

import pytest

from llorch_serve.http import connection, connection_limit, exchange
from llorch_serve.terminal.serving_fronts import read_tls
from support.builders.certificates import make_certificates
from support.fakes.generator import PATIENCE_S
from support.harness.http import fake_front, send

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def hurried(monkeypatch):
    """Limits that pass at once, in place of those that people wait for."""
    for name in dir(connection):
        if name.endswith("_S"):
            monkeypatch.setattr(connection, name, 0.02)


@contextlib.contextmanager
def connected(port, *sent, receive_buffer=None):
    with socket.socket() as client:
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(PATIENCE_S)
        client.connect(("127.0.0.1", port))
        for data in sent:
            client.sendall(data)
        yield client


def read_answer(client):
    """Read one whole answer and return its status."""
    with client.makefile("rb") as answer:
        status = int(answer.readline().split()[1])
        size = 0
        while (line := answer.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            size = int(value) if name.lower() == b"content-length" else size
        answer.read(size)
        return status


def ends(client):
    """Read until the connection ends; fails if it stays."""
    with contextlib.suppress(ConnectionError):
        while client.recv(2**16):
            pass


def held(front):
    """How many connections the front holds."""

    async def count():
        return len(front.http_front._server.server_state.connections)

    return front.on_loop(count())


def wait_until(front, condition):
    """Wait on the front's own loop until a condition on its state holds."""

    async def wait():
        while not condition():
            await asyncio.sleep(0)

    front.on_loop(wait())


UNFINISHED = {
    "nothing": b"",
    "a blank line": b"\r\n",
    "half a head": GET,
    "a body of an open route": GET + b"Content-Length: 100\r\n\r\n",
    "a chunked body of an open route": GET + b"Transfer-Encoding: chunked\r\n\r\n",
    "a body of no route": POST.replace(b"/v1/completions", b"/nowhere") + b"Content-Length: 100\r\n\r\n",
    "a body of another type": POST.replace(b"json", b"xml") + b"Content-Length: 100\r\n\r\n",
    "a body too large": POST + b"Content-Length: 99999999\r\n\r\n",
    "a promise to go on": GET + b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n",
    "an upgrade": GET + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 9\r\n\r\n",
    "a tunnel": GET.replace(b"GET /health", b"CONNECT a:1") + b"\r\n",
    "a whole request": GET + b"\r\n",
    "two requests and a half": (GET + b"\r\n") * 2 + GET,
}


@pytest.mark.parametrize("sent", UNFINISHED.values(), ids=list(UNFINISHED))
@pytest.mark.parametrize("byte", [b"", b"x"], ids=["", "then a byte"])
def test_a_connection_ends_whatever_is_left_undone(hurried, sent, byte):
    with fake_front() as (front, _), connected(front.port, sent) as client:
        if b"\r\n\r\n" in sent:
            read_answer(client)
        with contextlib.suppress(ConnectionError):
            client.sendall(byte)
        ends(client)
        assert held(front) == 0


def test_many_that_are_answered_before_their_body_do_not_stay(hurried):
    sent = GET + b"Content-Length: 100\r\n\r\n"
    with fake_front() as (front, _), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(front.port, sent)) for _ in range(200)]
        for client in clients:
            assert read_answer(client) == 200
            with contextlib.suppress(ConnectionError):
                client.sendall(b"x")
        for client in clients:
            ends(client)
        assert held(front) == 0


def test_an_answer_that_nobody_reads_ends_its_connection(monkeypatch):
    monkeypatch.setattr(connection, "LOOK_S", 0.02)
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 0.2)
    asked = b"GET /page/page.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with fake_front() as (front, _), connected(front.port, receive_buffer=4096) as client:
        client.setblocking(False)
        with contextlib.suppress(ConnectionError):
            while True:  # until it is cut
                with contextlib.suppress(BlockingIOError):
                    client.sendall(asked * 100)
        assert send(front.port, "GET", "/health").status == 200


def test_a_stream_that_nobody_reads_ends_its_request(monkeypatch):
    monkeypatch.setattr(connection, "LOOK_S", 0.02)
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 0.2)
    body = json.dumps({"prompt": "Hi", "max_tokens": 2000, "stream": True}).encode()
    sent = POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    with (
        fake_front(padding=10_000) as (front, generator),
        connected(front.port, sent, receive_buffer=4096),
    ):
        generator.wait_for(lambda g: g.submitted)
        connections = front.http_front._server.server_state.connections
        wait_until(front, lambda: not connections)
        front.on_loop(front.http_desk.wait_idle())
        generator.wait_for(lambda g: not g.live_ids)


def test_a_full_front_makes_room_for_a_probe(monkeypatch):
    monkeypatch.setattr(connection_limit, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(connection_limit, "MAX_REQUESTS", 4)
    body = json.dumps({"prompt": "Hi", "max_tokens": 2}).encode()
    sent = POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    with fake_front(free_running=False) as (front, generator), contextlib.ExitStack() as stack:
        asking = [stack.enter_context(connected(front.port, sent)) for _ in range(4)]
        generator.wait_for(lambda g: len(g.live_ids) == 4)
        assert send(front.port, "POST", "/v1/completions", body).status == 503
        silent = [stack.enter_context(connected(front.port, GET)) for _ in range(40)]
        for _ in range(10):
            assert send(front.port, "GET", "/health").status == 200
        assert held(front) <= 8
        for client in silent[:30]:
            ends(client)
        generator.run_freely()
        assert [read_answer(client) for client in asking] == [200] * 4
        assert send(front.port, "POST", "/v1/completions", body).status == 200


def test_handshakes_that_never_end_make_room_too(monkeypatch, tmp_path):
    monkeypatch.setattr(connection_limit, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(connection_limit, "MAX_REQUESTS", 4)
    made = make_certificates(tmp_path)
    trusted = ssl.create_default_context(cafile=made.ca)
    trusted.load_cert_chain(made.client_cert, made.client_key)
    tls = read_tls(made.server_cert, made.server_key, made.ca)
    with fake_front(tls=tls) as (front, _), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(front.port)) for _ in range(40)]
        with (
            connected(front.port) as plain,
            trusted.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            client.sendall(GET + b"\r\n")
            assert read_answer(client) == 200
        for client in silent[:32]:
            ends(client)


def test_a_process_that_may_open_no_further_file_makes_room_too(monkeypatch):
    accept, refused = socket.socket.accept, []

    def accept_later(listener):
        if not refused:
            refused.append(1)
            raise OSError(errno.EMFILE, "too many open files")
        return accept(listener)

    with fake_front() as (front, _), connected(front.port, GET) as silent:
        connections = front.http_front._server.server_state.connections
        wait_until(front, lambda: connections)
        monkeypatch.setattr(socket.socket, "accept", accept_later)
        assert send(front.port, "GET", "/health").status == 200
        assert refused
        ends(silent)


def test_a_request_without_a_token_keeps_no_place(monkeypatch):
    monkeypatch.setattr(connection_limit, "MAX_REQUESTS", 0)
    with fake_front(token="mine") as (front, _):
        assert send(front.port, "POST", "/v1/completions", {}).status == 401
        key = {"Authorization": "Bearer mine"}
        refused = send(front.port, "POST", "/v1/completions", {"prompt": "Hi"}, key)
        assert (refused.status, refused.document["error"]["code"]) == (503, "too_many_requests")
        assert refused.headers["retry-after"] == "1"
        assert send(front.port, "GET", "/health").status == 200


def test_bodies_that_arrive_at_once_are_bounded_over_all_connections(monkeypatch):
    monkeypatch.setattr(exchange, "MAX_BODIES_BYTES", 100_000)
    begun = POST + b"Content-Length: 60001\r\n\r\n" + b" " * 60_000
    with fake_front() as (front, _):
        http_front = front.http_front
        bodies = http_front._service.bodies
        with connected(front.port, begun) as first:
            wait_until(front, lambda: bodies.size == 60_000)
            with connected(front.port, begun) as second:
                assert read_answer(second) == 429
            assert bodies.size == 60_000
            first.sendall(b" ")
            assert read_answer(first) == 400  # whole, and no JSON
            wait_until(front, lambda: bodies.size == 0)
        with connected(front.port, begun):
            wait_until(front, lambda: bodies.size == 60_000)
        wait_until(front, lambda: bodies.size == 0)  # one that leaves gives back what it held


def test_what_a_client_sends_ahead_stays_in_the_kernel():
    body = json.dumps({"prompt": "Hi", "max_tokens": 2}).encode()
    sent = POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    with fake_front(free_running=False) as (front, generator), connected(front.port, sent) as client:
        generator.wait_for(lambda g: g.live_ids)
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):  # for good: nothing is read until the answer is out
            client.sendall((GET + b"\r\n") * 10**6)
        [one] = front.http_front._server.server_state.connections
        assert len(one.conn.trailing_data[0]) <= 4 * connection_limit.RECEIVE_BUFFER_BYTES


def chunked(body, size):
    """A body in chunks of so many bytes."""
    pieces = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("size", "letters", "status"), [(1, 900, 200), (1, 3000, 400), (20, 40_000, 400), (100, 200_000, 200)]
)
def test_a_body_in_too_many_tiny_chunks_is_refused(size, letters, status):
    body = json.dumps({"prompt": "a" * letters, "max_tokens": 1}).encode()
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    with fake_front() as (front, _), connected(front.port, head + chunked(body, size)) as client:
        assert read_answer(client) == status


@pytest.mark.parametrize(("lines", "status"), [(200, 200), (300, 400), (30_000, 400)])
def test_a_head_of_too_many_lines_is_refused(lines, status):
    with fake_front() as (front, _), connected(front.port, GET + b"a:\r\n" * lines + b"\r\n") as client:
        assert read_answer(client) == status


def test_a_whole_head_is_no_larger_than_one_that_comes_in_parts():
    with (
        fake_front() as (front, _),
        connected(front.port, GET + b"a: %b\r\n\r\n" % (b"a" * 60_000)) as client,
    ):
        assert read_answer(client) == 400


def test_a_body_that_breaks_after_its_answer_ends_the_connection_without_a_word(caplog):
    head = b"POST /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with fake_front() as (front, _), connected(front.port, head) as client:
        assert read_answer(client) == 405
        client.sendall(b"no chunk\r\n")
        ends(client)
        send(front.port, "GET", "/health")  # the loop has gone on
    assert not [record for record in caplog.records if record.exc_info]


def test_a_request_that_comes_close_behind_another_keeps_the_connection():
    class Connected:
        def fileno(self):
            return 5

    limit = connection_limit.ConnectionLimit()
    held = connection_limit.HeldConnection(limit, Connected())
    with contextlib.ExitStack() as second:
        with held.request():
            second.enter_context(held.request())
        assert held.serving
        assert limit.serving == 1
    assert not held.serving
    assert limit.serving == 0
