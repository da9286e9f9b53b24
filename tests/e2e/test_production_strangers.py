"""What a client without a token can do to a worker, through real connections: wait, be refused unread, and be
cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import tracemalloc

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from llorch_serve.errors import EngineStoppedError
from llorch_serve.rpc import SERVICE_NAME, connections, health, receiving, reflection, sending
from llorch_serve.rpc import server as rpc_server
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.security import Security
from support.fakes.generator import PATIENCE_S, FakeGenerator
from support.harness.raw_http2 import (
    INITIAL_WINDOW_SIZE,
    PREFACE,
    begun,
    call,
    connected,
    ended,
    ends,
    headers,
    settings,
)
from support.harness.rpc import open_stub, running_server

STATUS = health_pb2.HealthCheckResponse
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
GENERATE = f"/{SERVICE_NAME}/Generate"
REQUEST = pb.GenerateRequest(input=pb.Input(text="Hi"), sampling=pb.Sampling(max_tokens=2))
TOKEN = Security(tokens=("one",))
MIB = 2**20
SOON_S = 60.0  # what took for ever does not end within it, whatever the machine is busy with
NO_WINDOW = PREFACE + settings({INITIAL_WINDOW_SIZE: 0})
METHODS = tuple(pb.DESCRIPTOR.services_by_name["GenerationService"].methods)


def check(address):
    with grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=SOON_S).status


@contextlib.contextmanager
def never_sent():
    """Return a function that makes a request stream, which sends nothing until the block is left."""
    left = threading.Event()

    def requests():
        left.wait(PATIENCE_S)
        yield from ()

    try:
        yield requests
    finally:
        left.set()


@pytest.fixture
def impatient(monkeypatch):
    """Clients that take nothing are cut at once."""
    monkeypatch.setattr(sending, "LIMIT_S", 0.05)
    monkeypatch.setattr(connections, "PAUSE_S", 0.0)


# Health.


@pytest.mark.parametrize("end", ["drain", "fail"])
def test_a_watcher_that_takes_nothing_holds_up_neither_readiness_nor_the_end(end):
    generator = FakeGenerator()
    with running_server() as running, connected(running.address, SOON_S) as stuck:
        stuck.sendall(NO_WINDOW + call(WATCH, health_pb2.HealthCheckRequest()))
        with grpc.insecure_channel(running.address) as channel:
            good = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=SOON_S)
            assert next(good).status == STATUS.NOT_SERVING
            running.start(running.server.set_ready(generator)).result(SOON_S)
            assert next(good).status == STATUS.SERVING
            ending = {
                "drain": lambda: running.server.drain(asyncio.Event()),
                "fail": lambda: running.server.fail(EngineStoppedError("4711")),
            }[end]()
            running.start(ending).result(SOON_S)
            assert next(good).status == STATUS.NOT_SERVING
    generator.close()


def test_a_watcher_that_leaves_does_not_silence_the_others():
    with running_server() as running, contextlib.ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(running.address)) for _ in range(2)]
        leaving, staying = (
            health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=SOON_S)
            for channel in channels
        )
        assert next(leaving).status == next(staying).status == STATUS.NOT_SERVING
        gone = threading.Event()
        leaving.add_callback(gone.set)
        leaving.cancel()
        assert gone.wait(SOON_S)
        check(running.address)
        generator = FakeGenerator()
        running.call(running.server.set_ready(generator))
        assert next(staying).status == STATUS.SERVING
        running.call(running.server.drain(asyncio.Event()))
        assert next(staying).status == STATUS.NOT_SERVING
        generator.close()


@pytest.mark.parametrize("path", [CHECK, WATCH])
@pytest.mark.usefixtures("impatient")
def test_whoever_takes_nothing_loses_its_connection(path):
    with running_server(FakeGenerator()) as running, connected(running.address, SOON_S) as stuck:
        calls = (call(path, health_pb2.HealthCheckRequest(), stream) for stream in range(1, 400, 2))
        stuck.sendall(NO_WINDOW + b"".join(calls))
        assert ends(stuck)
        assert check(running.address) == STATUS.SERVING


def test_reflection_that_asks_nothing_ends_well(monkeypatch):
    monkeypatch.setattr(reflection, "IDLE_S", 0.05)
    with (
        running_server() as running,
        never_sent() as requests,
        grpc.insecure_channel(running.address) as channel,
    ):
        asked = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            requests(), timeout=SOON_S
        )
        assert list(asked) == []
        assert asked.code() is grpc.StatusCode.OK


# Refusal and messages.


@pytest.mark.parametrize("state", ["no token", "loading", "draining"])
def test_a_refused_call_is_not_read(state):
    wanted = grpc.StatusCode.UNAUTHENTICATED if state == "no token" else grpc.StatusCode.UNAVAILABLE
    security = TOKEN if state == "no token" else Security()
    generator = None if state == "loading" else FakeGenerator()
    with (
        running_server(generator, security=security) as running,
        never_sent() as requests,
        grpc.insecure_channel(running.address) as channel,
    ):
        if state == "draining":
            running.call(running.server.drain(asyncio.Event()))
        for method in METHODS:
            if state == "no token" or method.name not in ("GetLoad", "Abort"):
                asked = channel.stream_unary(f"/{SERVICE_NAME}/{method.name}").future(
                    requests(), timeout=SOON_S
                )
                assert asked.code() is wanted, method.name


@pytest.mark.parametrize("method", ["GetLoad", "GetModelInfo"])
def test_what_needs_no_message_waits_for_none(method):
    with (
        running_server(FakeGenerator()) as running,
        never_sent() as requests,
        grpc.insecure_channel(running.address) as channel,
    ):
        assert channel.stream_unary(f"/{SERVICE_NAME}/{method}").future(
            requests(), timeout=SOON_S
        ).code() is (grpc.StatusCode.OK)


@pytest.mark.parametrize("path", [GENERATE, CHECK])
def test_a_message_that_dribbles_ends_with_a_status(path, monkeypatch):
    for name in ("GUARANTEED_S", "LIMIT_S", "SMALL_LIMIT_S"):
        monkeypatch.setattr(receiving, name, 0.05)
    with running_server(FakeGenerator()) as running, connected(running.address, SOON_S) as slow:
        slow.sendall(PREFACE + settings() + begun(path, 15 * MIB, sent=bytes(100)))
        assert ended(slow, [1])
        assert check(running.address) == STATUS.SERVING


def test_honest_callers_are_served_beside_those_that_dribble(monkeypatch):
    monkeypatch.setattr(receiving, "RECEIVING_BYTES", 2 * 16 * MIB)
    monkeypatch.setattr(receiving, "GUARANTEED_S", 0.05)
    with (
        running_server(FakeGenerator()) as running,
        connected(running.address, SOON_S) as slow,
        open_stub(running.address) as stub,
    ):
        streams = range(1, 20, 2)
        slow.sendall(PREFACE + settings() + b"".join(begun(GENERATE, 15 * MIB, n) for n in streams))
        for _ in range(3):
            assert stub.Generate(REQUEST, timeout=SOON_S).choices[0].text == "w0 w1 "


def test_checks_are_answered_beside_those_that_dribble(monkeypatch):
    monkeypatch.setattr(receiving, "SMALL_LIMIT_S", 0.2)
    with running_server(FakeGenerator()) as running, connected(running.address, SOON_S) as slow:
        streams = range(1, 400, 2)
        slow.sendall(PREFACE + settings() + b"".join(begun(CHECK, 15 * MIB, n) for n in streams))
        assert check(running.address) == STATUS.SERVING
        assert ended(slow, streams)


def test_a_call_without_a_message_says_what_is_missing():
    with running_server(FakeGenerator()) as running, grpc.insecure_channel(running.address) as channel:
        asked = channel.stream_unary(GENERATE).future(iter(()), timeout=SOON_S)
        assert asked.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert asked.details() == "request: none came; expected one message"


def test_a_message_is_let_go_of_when_it_has_been_read():
    size = 8 * MIB
    unknown = b"\xfa\x7f" + b"\x80\x80\x80\x04" + bytes(size)  # field 2047, which there is not
    body = REQUEST.SerializeToString() + unknown
    generator = FakeGenerator(free_running=False)
    with (
        running_server(generator) as running,
        grpc.insecure_channel(running.address, options=(("grpc.max_send_message_length", -1),)) as channel,
    ):
        tracemalloc.start()  # sees what the server makes of it, and not what the client had before
        try:
            asked = channel.unary_unary(GENERATE).future(body, timeout=SOON_S)
            generator.wait_for(lambda g: g.live_ids)
            deadline = time.monotonic() + SOON_S
            held, most = tracemalloc.get_traced_memory()
            while (
                held > size // 2 and time.monotonic() < deadline
            ):  # the thread that read it goes on for a moment
                held, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        generator.run_freely()
        assert asked.code() is grpc.StatusCode.OK
    assert held < size // 2 < size < most


@pytest.mark.parametrize(
    "path", [GENERATE, *(f"/{SERVICE_NAME}/{name}" for name in ("Score", "Tokenize", "Detokenize")), CHECK]
)
def test_a_refused_message_is_let_go_of(path, monkeypatch):
    monkeypatch.setattr(health, "DISTRUST_S", 0.0)
    size = 8 * MIB
    body = b"\xff" * size
    with (
        running_server(FakeGenerator()) as running,
        grpc.insecure_channel(running.address, options=(("grpc.max_send_message_length", -1),)) as channel,
    ):
        ask = channel.unary_unary(path)
        tracemalloc.start()
        gc.disable()
        try:
            for _ in range(4):
                with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                    ask(body, timeout=SOON_S)
            deadline = time.monotonic() + SOON_S
            held, most = tracemalloc.get_traced_memory()
            while held > size // 2 and time.monotonic() < deadline:
                held, most = tracemalloc.get_traced_memory()
        finally:
            gc.enable()
            tracemalloc.stop()
    assert held < size // 2 < size < most


def test_after_a_large_check_others_are_answered_and_not_received():
    size = 8 * MIB
    with (
        running_server(FakeGenerator()) as running,
        grpc.insecure_channel(running.address, options=(("grpc.max_send_message_length", -1),)) as channel,
    ):
        ask = channel.unary_unary(CHECK)
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            ask(bytes(size), timeout=SOON_S)
        body = bytes(size)
        tracemalloc.start()
        try:
            told = [ask(body, timeout=SOON_S) for _ in range(4)]
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert {health_pb2.HealthCheckResponse.FromString(one).status for one in told} == {STATUS.SERVING}
        assert most < size // 2
        assert check(running.address) == STATUS.SERVING


# Connections.


def test_connections_are_bounded_and_a_place_is_free_again(monkeypatch):
    monkeypatch.setattr(rpc_server, "MAX_CONNECTIONS", 2)
    with running_server(FakeGenerator()) as running, contextlib.ExitStack() as stack:
        first = stack.enter_context(connected(running.address, SOON_S))
        second = stack.enter_context(connected(running.address, SOON_S))
        for connection in (first, second):
            connection.sendall(PREFACE + settings() + headers(WATCH))
            assert connection.recv(1)
        with connected(running.address, SOON_S) as third:
            with contextlib.suppress(ConnectionError):
                third.sendall(PREFACE + settings())
            assert ends(third)
        second.close()
        healthy = None
        while healthy is None:  # until the worker has seen that the connection is closed
            with contextlib.suppress(grpc.RpcError):
                healthy = check(running.address)
        assert healthy == STATUS.SERVING


def test_streams_of_a_connection_are_bounded():
    with running_server() as running, connected(running.address, SOON_S) as connection:
        connection.sendall(PREFACE + settings())
        assert b"\x00\x03" + rpc_server._MAX_STREAMS.to_bytes(4, "big") in connection.recv(2**16)
