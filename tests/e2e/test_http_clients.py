"""What HTTP does for clients beyond the routes themselves: hosts and pages of elsewhere, bytes in silent
streams, names of the model, fields left aside, and paths that are nearly right.
"""

from __future__ import annotations

import http.client
import json
import logging

import grpc
import pytest

from llorch_serve.errors import UsageError
from llorch_serve.http import exchange
from llorch_serve.http.server import hosts_of
from llorch_serve.http.settings import HttpSettings
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc import worker_pb2_grpc
from llorch_serve.terminal.http_flags import HttpFlags
from support.fakes.generator import INFO, PATIENCE_S
from support.harness.http import fake_front, send

pytestmark = pytest.mark.usefixtures("way_at_leisure")

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
PAGE = "http://localhost:3000"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


# Hosts.


def test_a_worker_on_the_loopback_answers_further_hosts_if_told_to():
    name = {"Host": "host.docker.internal:8080"}
    with fake_front() as (front, _):
        answer = send(front.port, "GET", "/v1/models", headers=name)
        assert answer.status == 403
        assert "--allowed-host host.docker.internal" in answer.document["error"]["message"]
    with fake_front(settings=HttpSettings(hosts=("host.docker.internal",))) as (front, _):
        assert send(front.port, "GET", "/v1/models", headers=name).status == 200
        assert send(front.port, "GET", "/v1/models", headers={"Host": "localhost"}).status == 200
        assert send(front.port, "GET", "/v1/models", headers={"Host": "elsewhere.example"}).status == 403


@pytest.mark.parametrize(
    ("host", "allowed", "expected"),
    [
        ("127.0.0.1", (), {"localhost", "127.0.0.1", "[::1]"}),
        ("127.0.0.1", ("gpu-box",), {"localhost", "127.0.0.1", "[::1]", "gpu-box"}),
        ("127.0.0.1", ("*",), None),
        ("0.0.0.0", (), None),
        ("0.0.0.0", ("gpu-box",), {"localhost", "127.0.0.1", "[::1]", "gpu-box"}),
        ("Work-Station", ("gpu-box",), {"localhost", "127.0.0.1", "[::1]", "gpu-box", "work-station"}),
        ("192.168.7.7", ("gpu-box",), {"localhost", "127.0.0.1", "[::1]", "gpu-box", "192.168.7.7"}),
    ],
)
def test_the_hosts_under_which_a_worker_is_addressed(host, allowed, expected):
    assert hosts_of(host, allowed) == expected


# Pages of elsewhere.


def test_pages_of_elsewhere_may_not_ask_unless_told():
    with fake_front() as (front, _):
        answer = send(front.port, "OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
        assert answer.status == 403
        assert f"--allowed-origin {PAGE}" in answer.document["error"]["message"]
        answer = send(front.port, "POST", "/v1/chat/completions", CHAT, {"Origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert send(front.port, "OPTIONS", "/v1/chat/completions").status == 405


@pytest.mark.parametrize("token", [None, "open sesame"])
def test_a_page_that_is_allowed_asks_and_reads(token):
    with fake_front(settings=HttpSettings(origins=(PAGE, "app://obsidian.md")), token=token) as (front, _):
        answer = send(front.port, "OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
        assert (answer.status, answer.body) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "Origin" in answer.headers["vary"]
        shown = {"Origin": PAGE} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        answer = send(front.port, "POST", "/v1/chat/completions", CHAT, shown)
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        told = {name.lower() for name in answer.headers["access-control-expose-headers"].split(", ")}
        assert {"x-request-id", "request-id", "retry-after"} <= told
        refused = send(front.port, "POST", "/v1/chat/completions", b"{", {"Origin": PAGE})
        assert refused.headers["access-control-allow-origin"] == PAGE  # so that the page can read why
        answer = send(front.port, "GET", "/v1/models", headers=shown | {"Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
        answer = send(front.port, "OPTIONS", "/v1/models", headers=PREFLIGHT | {"Origin": "null"})
        assert answer.status == 403


def test_every_page_may_be_allowed_and_reach_a_private_network():
    with fake_front(settings=HttpSettings(origins=("*",))) as (front, _):
        asks = PREFLIGHT | {"Access-Control-Request-Private-Network": "true", "Origin": "null"}
        answer = send(front.port, "OPTIONS", "/v1/chat/completions", headers=asks)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (204, "*")
        assert answer.headers["access-control-allow-private-network"] == "true"
        hostile = PREFLIGHT | {"Access-Control-Request-Headers": "a\tb"}
        answer = send(front.port, "OPTIONS", "/v1/chat/completions", headers=hostile)
        assert answer.headers["access-control-allow-headers"] == "Authorization, Content-Type"


# Flags.


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({"allowed_host": ["http://a"]}, "--allowed-host is 'http://a'"),
        ({"allowed_host": ["a:80"]}, "--allowed-host is 'a:80'"),
        ({"allowed_host": [""]}, "--allowed-host is ''"),
        ({"allowed_origin": ["localhost:3000"]}, "--allowed-origin is 'localhost:3000'"),
        ({"allowed_origin": ["http://a/page"]}, "--allowed-origin is 'http://a/page'"),
    ],
)
def test_names_that_could_never_come_are_refused(flags, found):
    with pytest.raises(UsageError, match="expected") as caught:
        HttpFlags(**flags).read("8080")
    assert str(caught.value).startswith(found)


def test_names_are_read_as_browsers_write_them():
    flags = HttpFlags(
        allowed_host=["GPU-Box", "::1", "*"],
        allowed_origin=["HTTP://Localhost:80", "https://a.example:443", "https://b:8443", "null", "*"],
    )
    settings = flags.read("8080")
    assert settings.hosts == ("gpu-box", "[::1]", "*")
    assert settings.origins == ("http://localhost", "https://a.example", "https://b:8443", "null", "*")
    with pytest.raises(UsageError, match="--allowed-host has no effect without --http"):
        flags.read(None)
    assert HttpFlags().read(None) == HttpSettings()


# Silent streams.


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/inference"])
def test_a_stream_that_waits_is_kept_alive(monkeypatch, path):
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.01)
    body = (CHAT if "chat" in path else {"prompt": "Hi", "max_tokens": 2}) | (
        {} if path == "/v1/inference" else {"stream": True}
    )
    with fake_front(free_running=False, slots=0) as (front, generator):
        connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=PATIENCE_S)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        lines = iter(response.readline, b"")
        for _ in range(3):
            assert next(line for line in lines if line.startswith(b":")) == b": keep-alive\n"
            assert next(lines) == b"\n"
        generator._slots = 8
        generator.run_freely()
        rest = b"".join(lines)
        assert rest.endswith(b"data: [DONE]\n\n")
        assert rest.count(b"w1") == 1
        connection.close()


# Names of the model.


def test_a_model_is_served_under_further_names():
    names = ("gpt-4o-mini", "gpt-4o")
    with fake_front(served_names=names) as (front, _):
        listed = send(front.port, "GET", "/v1/models").document["data"]
        assert [model["id"] for model in listed] == list(names)
        assert {model["llorch"]["model_id"] for model in listed} == {INFO.model_id}
        for asked, told in (("gpt-4o", "gpt-4o"), (INFO.model_id, INFO.model_id), (None, "gpt-4o-mini")):
            answer = send(front.port, "POST", "/v1/chat/completions", CHAT | {"model": asked})
            assert answer.document["model"] == told
        assert send(front.port, "GET", "/v1/models/gpt-4o").document["id"] == "gpt-4o"
        answer = send(front.port, "POST", "/v1/chat/completions", CHAT | {"model": "gpt-5"})
        assert answer.status == 404
        for name in (*names, INFO.model_id):
            assert name in answer.document["error"]["message"]


def test_the_names_count_over_grpc_too():
    with fake_front(served_names=("gpt-4o",)) as (front, _), grpc.insecure_channel(front.rpc) as channel:
        stub = worker_pb2_grpc.GenerationServiceStub(channel)
        assert list(stub.GetModelInfo(pb.GetModelInfoRequest()).served_names) == ["gpt-4o"]

        def ask(name):
            request = pb.GenerateRequest(input=pb.Input(text="Hi"), model=name)
            request.sampling.max_tokens = 1
            return stub.Generate(request, timeout=PATIENCE_S)

        for name in ("gpt-4o", INFO.model_id):
            assert ask(name).choices[0].text == "w0 "
        with pytest.raises(grpc.RpcError, match="serves 'gpt-4o', 'fake-1M'"):
            ask("gpt-5")


def test_a_model_of_another_name_is_told_of_the_flag():
    with fake_front() as (front, _):
        answer = send(front.port, "POST", "/v1/chat/completions", CHAT | {"model": "gpt-4o"})
        assert "--served-model-name" in answer.document["error"]["message"]


# Fields left aside.


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_was_left_aside_is_told_in_the_answer_and_once_in_the_log(stream, caplog):
    caplog.set_level(logging.WARNING, logger="llorch_serve.http")
    body = CHAT | {"think": False, "num_ctx": 4096, "stream": stream, "a\nb": 1}
    with fake_front(settings=HttpSettings(unknown=UnknownFields.IGNORE)) as (front, _):
        for _ in range(2):
            answer = send(front.port, "POST", "/v1/chat/completions", body)
            last = answer.events[-1][1] if stream else answer.document
            assert last["llorch"]["ignored"] == ["think", "num_ctx", "a\nb"]
            assert last["choices"][0]["llorch"]["ignored"] == last["llorch"]["ignored"]
        plain = send(front.port, "POST", "/v1/chat/completions", CHAT).document
        assert "ignored" not in plain["choices"][0]["llorch"]
        assert "llorch" not in plain
        answer = send(front.port, "POST", "/v1/inference", {"prompt": "a", "think": 1})
        assert answer.status == 400  # jobs are as they were
    (line,) = [record.getMessage() for record in caplog.records]
    assert "num_ctx, think" in line
    assert "\n" not in line


def test_the_log_does_not_grow_with_what_people_invent(caplog):
    caplog.set_level(logging.WARNING, logger="llorch_serve.http")
    with fake_front(settings=HttpSettings(unknown=UnknownFields.IGNORE)) as (front, _):
        for start in range(0, 1000, 20):
            invented = {f"field{start + i}": 1 for i in range(20)}
            assert send(front.port, "POST", "/v1/chat/completions", CHAT | invented).status == 200
    assert len(caplog.records) < 20


# Paths that are nearly right.


@pytest.mark.parametrize(
    ("method", "asked", "right"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/completions", "/v1/completions"),
        ("GET", "/models", "/v1/models"),
        ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),
        ("POST", "//v1//completions", "/v1/completions"),
        ("POST", "/api/v1/chat/completions", "/v1/chat/completions"),
        ("POST", "/openai/v1/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("GET", "/v1/models/", "/v1/models"),
        ("GET", "/v1/health", "/health"),
        ("GET", "/health/", "/health"),
        ("GET", "/v1", "/v1/models"),
        ("GET", "/v1/", "/v1/models"),
    ],
)
def test_a_path_that_is_nearly_right_is_told_the_right_one(method, asked, right):
    with fake_front() as (front, _):
        answer = send(front.port, method, asked, CHAT if method == "POST" else None)
        assert answer.status == 404
        assert "location" not in answer.headers
        assert f"call {right}" in answer.document["error"]["message"]


def test_a_path_of_nothing_is_told_where_to_look():
    with fake_front() as (front, _):
        for path in ("/nothing", "/api/chat", "/v1/engines", "/v1/chat"):
            message = send(front.port, "GET", path).document["error"]["message"]
            assert "docs/http.md" in message
