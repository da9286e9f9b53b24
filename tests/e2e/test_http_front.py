"""HTTP itself: shapes of refusals, ids, bounds, clients that leave, clients that do not read, loading and
draining.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import struct
import threading

import pytest

from llorch_serve.errors import EngineStoppedError, PortError
from llorch_serve.http import connection, exchange
from llorch_serve.http.server import HttpConfig, HttpFront, read_address
from llorch_serve.requests import TextPrompt
from llorch_serve.terminal.serving_fronts import read_tls
from support.builders.certificates import make_certificates
from support.fakes.generator import INFO, LOAD, PATIENCE_S, FakeGenerator
from support.harness.http import fake_front, running_front, send
from support.harness.rpc import held_up

pytestmark = pytest.mark.usefixtures("way_at_leisure")

BODY = {"prompt": "Hi", "max_tokens": 2}


def connect(port: int, path: str, body: object, *, receive_buffer: int | None = None) -> socket.socket:
    """Send a request over a bare socket, and leave it open."""
    raw = json.dumps(body).encode()
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(PATIENCE_S)
    client.connect(("127.0.0.1", port))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(raw)}\r\n\r\n"
    )
    client.sendall(head.encode() + raw)
    return client


def test_a_job_is_answered_in_events():
    with fake_front() as (front, generator):
        answer = send(front.port, "POST", "/v1/inference", {"job_id": "j", "prompt": "Hi", "max_tokens": 3})
        assert answer.headers["content-type"] == "text/event-stream"
        events = answer.events
        names = [name for name, _ in events]
        assert names[0] == "started"
        assert names[-2:] == ["metrics", "end"]
        assert set(names[1:-2]) == {"token"}
        assert (events[0][1]["job_id"], events[0][1]["model"]) == ("j", INFO.model_id)
        tokens = [data for name, data in events if name == "token"]
        assert "".join(token["t"] for token in tokens) == "w0 w1 w2 "
        assert [token["i"] for token in tokens] == list(range(len(tokens)))
        assert events[-1][1] == {
            "tokens_out": 3,
            "decode_time_ms": 1750,
            "stop_reason": "MAX_TOKENS",
            "stop_sequence_matched": None,
        }
        assert generator.submitted[0].request_id == "j"
        assert generator.submitted[0].prompt == TextPrompt("Hi")


def test_execute_is_the_same_and_stop_strings_are_told():
    with fake_front() as (front, _):
        events = send(front.port, "POST", "/execute", {"prompt": "Hi", "stop": ["w1"]}).events
        assert events[-1][1]["stop_reason"] == "STOP_SEQUENCE"
        assert events[-1][1]["stop_sequence_matched"] == "w1"


def test_a_job_that_fails_ends_with_one_error():
    with fake_front() as (front, generator):
        generator.fail_step = RuntimeError("inside")
        events = send(front.port, "POST", "/v1/inference", BODY).events
        assert [name for name, _ in events] == ["started", "error"]
        assert events[1][1]["code"] == "INTERNAL_ERROR"
        assert "inside" not in events[1][1]["message"]


def test_a_job_is_cancelled():
    with fake_front(free_running=False) as (front, generator):
        with connect(front.port, "/v1/inference", {"job_id": "j", "prompt": "Hi"}) as client:
            generator.wait_for(lambda g: g.live_ids)
            for _ in range(2):  # the second finds nothing, and says the same
                assert send(front.port, "POST", "/cancel", {"job_id": "j"}).status == 202
            text = client.makefile("rb").read1(10_000)
            while b"[DONE]" not in text:
                text += client.recv(10_000)
        assert b'event: error\ndata: {"code":"CANCELLED"' in text
        assert b"event: end" not in text
        generator.wait_for(lambda g: not g.live_ids)


def test_bad_jobs_are_refused_with_every_field():
    with fake_front() as (front, _):
        answer = send(front.port, "POST", "/execute", {"prompt": 1, "top_k": "a", "other": 1})
        assert answer.status == 400
        assert sorted(e["field"] for e in answer.document["errors"]) == ["other", "prompt", "top_k"]
        answer = send(front.port, "POST", "/execute", {"prompt": "a", "temperature": 9, "max_tokens": -1})
        assert [e["field"] for e in answer.document["errors"]] == ["temperature", "max_tokens"]
        assert send(front.port, "POST", "/execute", {"prompt": "a", "job_id": ""}).status == 400
        assert send(front.port, "POST", "/cancel", {}).document["errors"][0]["field"] == "job_id"


def test_refusals_have_the_shape_of_their_route():
    with fake_front() as (front, _):
        answer = send(front.port, "GET", "/v1/chat/completions")
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        assert answer.document["error"]["code"] == "method_not_allowed"
        assert send(front.port, "DELETE", "/cancel").document == {
            "error": {"code": "method_not_allowed", "message": "DELETE is not what /cancel takes; use POST"}
        }
        answer = send(front.port, "GET", "/nothing/here")
        assert (answer.status, answer.document["error"]["type"]) == (404, "invalid_request_error")
        answer = send(front.port, "POST", "/v1/completions", BODY, {"Content-Type": "text/plain"})
        assert (answer.status, answer.document["error"]["code"]) == (415, "unsupported_media_type")
        answer = send(front.port, "POST", "/v1/completions", b"{")
        assert (answer.status, answer.document["error"]["param"]) == (400, "body")


def test_a_large_body_is_refused_by_its_length_and_by_what_comes():
    size = exchange.MAX_BODY_BYTES
    with fake_front() as (front, generator):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", front.port), PATIENCE_S) as client:
            client.sendall(head + f"Content-Length: {size + 1}\r\n\r\n".encode())  # and not a byte of it
            assert client.recv(1000).startswith(b"HTTP/1.1 413 ")
        answer = send(
            front.port,
            "POST",
            "/v1/completions",
            b'{"prompt": "' + b"a" * (size - 100) + b'", "max_tokens": 0}',
        )
        assert answer.status in (200, 400)  # within the limit
        with socket.create_connection(("127.0.0.1", front.port), PATIENCE_S) as client:
            client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            piece = f"{2**20:x}\r\n".encode() + b"a" * 2**20 + b"\r\n"
            try:
                for _ in range(size // 2**20 + 1):
                    client.sendall(piece)
                answer = client.recv(1000)
            except ConnectionError:  # cut while we were still sending, which is as good
                answer = b"HTTP/1.1 413 "
            assert answer.startswith(b"HTTP/1.1 413 ")
        assert len(generator.submitted) <= 1


def test_a_body_that_does_not_come_times_out(monkeypatch):
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 0.05)
    with (
        fake_front() as (front, _),
        socket.create_connection(("127.0.0.1", front.port), PATIENCE_S) as client,
    ):
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            b"application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_correlation_ids_go_through():
    with fake_front() as (front, generator):
        answer = send(front.port, "POST", "/v1/completions", BODY, {"X-Correlation-ID": "abc-1"})
        assert answer.headers["x-correlation-id"] == "abc-1"
        assert generator.submitted[0].correlation_id == "abc-1"
        for hostile in ("", "a b", "ä", "x" * 129):
            drawn = send(front.port, "GET", "/health", None, {"X-Correlation-ID": hostile.encode("latin-1")})
            assert len(drawn.headers["x-correlation-id"]) == 16
        assert send(front.port, "GET", "/nothing").headers["x-correlation-id"]
        assert front.answered[0].correlation_id == "abc-1"


@pytest.mark.parametrize("slots", [0, 8], ids=["queued", "running"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_client_that_leaves_ends_its_request(slots, stream, reset):
    with fake_front(free_running=False, slots=slots) as (front, generator):
        client = connect(front.port, "/v1/completions", {"prompt": ["a", "b"], "stream": stream})
        generator.wait_for(lambda g: len(g.live_ids) == 2)
        generator.step()
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        generator.wait_for(lambda g: not g.live_ids)
        assert len(generator.aborted) == 2


def test_a_client_that_leaves_while_its_prompt_is_read_ends_its_request_too():
    with fake_front(free_running=False) as (front, generator):
        generator.submit_gate = threading.Event()
        connect(front.port, "/v1/completions", BODY).close()
        generator.wait_for(lambda g: g.submitted)
        # The front has seen it leave once it says so; only then may the submission go on.
        front.on_loop(_until(lambda: front.answered))
        generator.submit_gate.set()
        generator.wait_for(lambda g: g.aborted and not g.live_ids)
        assert front.answered[0].status is None


async def _until(happened):
    while not happened():
        await asyncio.sleep(0)


def test_a_slow_reader_holds_its_own_answer_and_nothing_else():
    tokens, padding = 4000, 1000
    body = {"prompt": "a", "stream": True, "max_tokens": tokens}
    with (
        fake_front(padding=padding) as (front, generator),
        connect(front.port, "/v1/completions", body, receive_buffer=4096) as client,
    ):
        # The model is done, nobody has read, and others are answered meanwhile.
        generator.wait_for(lambda g: g.submitted and not g.live_ids)
        assert send(front.port, "POST", "/v1/completions", BODY).status == 200
        text, events = "", 0
        for line in client.makefile("rb"):
            if line == b"data: [DONE]\n":
                break
            if line.startswith(b"data: "):
                events += 1
                text += json.loads(line[6:])["choices"][0]["text"]
        assert text.count("w") == tokens
        assert events < tokens / 2  # what it did not read in time came joined


def test_loading_serving_draining():
    with running_front(None) as front:
        assert send(front.port, "GET", "/health").status == 503
        assert send(front.port, "GET", "/health").document["status"] == "starting"
        assert "provider" not in send(front.port, "GET", "/health").document, "not known yet"
        answer = send(front.port, "POST", "/v1/completions", BODY)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert send(front.port, "GET", "/v1/models").status == 503
        generator = FakeGenerator(free_running=False)
        front.on_loop(front.fronts.set_ready(generator))
        assert send(front.port, "GET", "/health").document == {
            "status": "ready",
            "reason": None,
            "load_percent": 100.0,
            "provider": INFO.provider,
            "device": INFO.device,
            "provider_shares": [
                {
                    "provider": share.provider,
                    "node_share": share.node_share,
                    "weight_share": share.weight_share,
                }
                for share in INFO.provider_shares
            ],
        }
        with connect(
            front.port, "/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}
        ) as client:
            generator.wait_for(lambda g: g.live_ids)

            async def drain():
                return asyncio.ensure_future(front.fronts.drain(asyncio.Event()))

            draining = front.on_loop(drain())
            assert send(front.port, "GET", "/health").document["status"] == "draining"
            assert send(front.port, "POST", "/v1/completions", BODY).status == 503
            generator.run_freely()

            async def drained():
                await draining

            front.on_loop(drained())
            text = b""
            while b"[DONE]" not in text:
                text += client.recv(10_000)
            assert b"w1" in text
        generator.close()


def test_a_request_that_is_still_to_be_read_when_all_are_ended_is_told_too(monkeypatch):
    forced = asyncio.Event()
    forced.set()
    with fake_front(free_running=False) as (front, generator):
        desk = front.http_desk
        with held_up(desk, monkeypatch) as queued, connect(front.port, "/v1/completions", BODY) as client:
            assert queued.wait(PATIENCE_S)
            front.on_loop(front.fronts.drain(forced))
            assert client.recv(10_000).startswith(b"HTTP/1.1 503")
        generator.wait_for(lambda g: g.submitted and not g.live_ids)


def test_a_drain_that_is_forced_ends_answers_with_an_error():
    with fake_front(free_running=False, drain_timeout_s=0) as (front, generator):
        with connect(front.port, "/v1/completions", {"prompt": "a", "stream": True}) as client:
            generator.wait_for(lambda g: g.live_ids)
            front.on_loop(front.fronts.drain(asyncio.Event()))
            text = b""
            while b"[DONE]" not in text:
                text += client.recv(10_000)
        assert b"shut down before the answer was complete" in text


def test_an_engine_that_died_ends_answers_and_takes_no_more():
    with fake_front(free_running=False) as (front, generator):
        with connect(front.port, "/v1/completions", {"prompt": "a", "stream": True}) as client:
            generator.wait_for(lambda g: g.live_ids)
            front.on_loop(front.fronts.fail(EngineStoppedError("abc123")))
            text = b""
            while b"[DONE]" not in text:
                text += client.recv(10_000)
        assert b"error id abc123" in text
        assert send(front.port, "GET", "/health").status == 503
        assert send(front.port, "GET", "/health").document["status"] == "failed"
        assert send(front.port, "POST", "/v1/completions", BODY).status == 503


def test_https_is_spoken_with_a_certificate(tmp_path):
    certificates = make_certificates(tmp_path)
    tls = read_tls(certificates.server_cert, certificates.server_key, None)
    with fake_front(tls=tls) as (front, _):
        trusted = ssl.create_default_context(cafile=certificates.ca)
        client = http.client.HTTPSConnection("127.0.0.1", front.port, context=trusted, timeout=PATIENCE_S)
        with contextlib.closing(client):
            client.request("GET", "/health")
            assert client.getresponse().status == 200
    tls = read_tls(certificates.server_cert, certificates.server_key, certificates.ca)
    with fake_front(tls=tls) as (front, _):
        for cert, key in (
            (certificates.stranger_cert, certificates.stranger_key),
            (certificates.client_cert, certificates.client_key),
        ):
            trusted = ssl.create_default_context(cafile=certificates.ca)
            trusted.load_cert_chain(cert, key)
            client = http.client.HTTPSConnection("127.0.0.1", front.port, context=trusted, timeout=PATIENCE_S)
            with contextlib.closing(client):
                try:
                    client.request("GET", "/health")
                    assert client.getresponse().status == 200
                    assert cert == certificates.client_cert
                except (ssl.SSLError, ConnectionError):
                    assert cert == certificates.stranger_cert


def test_a_job_is_cancelled_by_its_own_caller_alone():
    with fake_front(free_running=False, token="mine") as (front, generator):
        key = {"Authorization": "Bearer mine"}
        raw = json.dumps({"job_id": "j", "prompt": "Hi"}).encode()
        client = http.client.HTTPConnection("127.0.0.1", front.port, timeout=PATIENCE_S)
        with contextlib.closing(client):
            client.request("POST", "/v1/inference", raw, key | {"Content-Type": "application/json"})
            generator.wait_for(lambda g: g.live_ids)
            other = {"Authorization": "Bearer another"}
            assert send(front.port, "POST", "/cancel", {"job_id": "j"}, other).status == 202
            assert generator.aborted == []
            assert send(front.port, "POST", "/cancel", {"job_id": "j"}, key).status == 202
            generator.wait_for(lambda g: not g.live_ids)
            assert b'"CANCELLED"' in client.getresponse().read()


def test_a_job_is_cancelled_by_the_holder_of_its_own_certificate_alone(tmp_path):
    certificates = make_certificates(tmp_path)
    tls = read_tls(certificates.server_cert, certificates.server_key, certificates.ca)

    def connected(port, cert, key):
        trusted = ssl.create_default_context(cafile=certificates.ca)
        trusted.load_cert_chain(cert, key)
        client = http.client.HTTPSConnection("127.0.0.1", port, context=trusted, timeout=PATIENCE_S)
        return contextlib.closing(client)

    def post(client, path, body):
        client.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})

    own = certificates.client_cert, certificates.client_key
    other = certificates.server_cert, certificates.server_key
    with (
        fake_front(free_running=False, tls=tls) as (front, generator),
        connected(front.port, *own) as client,
    ):
        post(client, "/v1/inference", {"job_id": "j", "prompt": "Hi"})
        generator.wait_for(lambda g: g.live_ids)
        assert generator.submitted[0].client_id.startswith("certificate:")
        for files, ended in ((other, []), (own, ["j"])):
            with connected(front.port, *files) as canceller:
                post(canceller, "/cancel", {"job_id": "j"})
                assert canceller.getresponse().status == 202
            generator.wait_for(lambda g, ended=ended: g.aborted == ended)
        assert b'"CANCELLED"' in client.getresponse().read()


def test_a_head_that_does_not_come_in_time_ends_the_connection(monkeypatch):
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"

    with fake_front() as (front, _):
        there = ("127.0.0.1", front.port)
        with socket.create_connection(there, PATIENCE_S) as used, used.makefile("rb") as answers:
            used.sendall(head + b"\r\n")
            assert answers.readline().startswith(b"HTTP/1.1 200")
            monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
            used.sendall(head)
            assert b"HTTP/1.1" not in answers.read()  # which ends with the connection
        with socket.create_connection(there, PATIENCE_S) as silent:
            assert silent.recv(1) == b""


def test_an_answer_may_take_longer_than_a_head(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.5)
    with (
        fake_front(free_running=False) as (front, generator),
        connect(front.port, "/v1/completions", BODY) as client,
    ):
        generator.wait_for(lambda g: g.live_ids)
        with socket.create_connection(("127.0.0.1", front.port), PATIENCE_S) as silent:
            assert silent.recv(1) == b""  # by then the answer's time would be over too
        generator.run_freely()
        assert client.recv(10_000).startswith(b"HTTP/1.1 200")


def test_use_over_http_counts_against_idleness():
    with fake_front(free_running=False) as (front, generator):
        http_front = front.http_front
        with connect(front.port, "/v1/completions", BODY):
            generator.wait_for(lambda g: g.live_ids)
            assert http_front.idle_s() == 0
            generator.run_freely()
            generator.wait_for(lambda g: not g.live_ids)


def test_a_taken_port_is_refused_at_once():
    with fake_front() as (front, _):

        async def bind():
            await HttpFront(HttpConfig("127.0.0.1", front.port), lambda: LOAD, lambda: (b"", "")).bind()

        with pytest.raises(PortError, match=f"cannot listen on 127.0.0.1:{front.port}.*--http"):
            asyncio.run(bind())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:80", ("::1", 80)),
        (":1", ("127.0.0.1", 1)),
    ],
)
def test_addresses(text, address):
    assert read_address(text) == address


@pytest.mark.parametrize("text", ["", "a", "host:", "h:70000", "h:-1"])
def test_addresses_that_are_none(text):
    with pytest.raises(PortError, match="--http is"):
        read_address(text)


def test_a_site_that_points_at_the_loopback_is_kept_out():
    with fake_front() as (front, _):
        for host, status in (
            ("evil.example", 403),
            (f"localhost:{front.port}", 200),
            ("[::1]:1", 200),
            ("", 403),
        ):
            answer = send(front.port, "GET", "/health", None, {"Host": host})
            assert (host, answer.status) == (host, status)


def test_browsers_are_bound():
    with fake_front() as (front, _):
        answer = send(front.port, "GET", "/")
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert b"http://" not in answer.body
        assert b"https://" not in answer.body
