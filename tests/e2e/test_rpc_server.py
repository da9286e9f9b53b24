"""A worker's life as others see it: port, health, reflection, signals, drain, exit."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from llorch_serve.errors import ArtifactError, PortError, UnavailableError
from llorch_serve.lifecycle.serving import serve
from llorch_serve.rpc import SERVICE_NAME, worker_pb2_grpc
from llorch_serve.rpc import server as rpc_server
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.server import ServerConfig
from llorch_serve.rpc.status import read_status
from support.fakes.generator import PATIENCE_S, FakeGenerator
from support.harness.processes import with_scripts
from support.harness.rpc import RunningServer, held_up, open_stub, running_server

STATUS = health_pb2.HealthCheckResponse
REQUEST = pb.GenerateRequest(input=pb.Input(text="Hi"), sampling=pb.Sampling(max_tokens=2))


def check(channel, service=""):
    request = health_pb2.HealthCheckRequest(service=service)
    return health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_S).status


def watch(channel, service=""):
    request = health_pb2.HealthCheckRequest(service=service)
    return (m.status for m in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=PATIENCE_S))


def refusal(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return read_status(caught.value, address="here")


# Port.


def test_a_port_in_use_is_named():
    with running_server() as first:
        port = int(first.address.rsplit(":", 1)[1])
        with pytest.raises(PortError) as caught:
            RunningServer(ServerConfig(port=port))
    assert str(caught.value).startswith(f"cannot listen on {first.address}: Address already in use; ")


def test_grpc_itself_does_not_share_a_port(monkeypatch):
    monkeypatch.setattr(rpc_server, "_probe", lambda *_: None)  # two workers that start in the same instant
    with running_server() as first, pytest.raises(PortError, match=first.address):
        RunningServer(ServerConfig(port=int(first.address.rsplit(":", 1)[1])))


def test_localhost_is_refused_where_one_of_its_addresses_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortError, match="localhost"):
        RunningServer(ServerConfig(host="localhost", port=taken.getsockname()[1]))


@pytest.mark.parametrize(
    ("host", "port", "reason"),
    [
        ("no-such-host.invalid", 0, "host not known"),
        ("a" * 70, 0, "host not known"),
        ("192.0.2.1", 0, "Cannot assign requested address"),
        ("127.0.0.1", 70_000, "from 0 to 65535"),
    ],
)
def test_an_impossible_address_says_why(host, port, reason):
    with pytest.raises(PortError, match=reason) as caught:
        RunningServer(ServerConfig(host=host, port=port))
    assert "\n" not in str(caught.value)


# Health and reflection.


def test_health_follows_the_worker():
    with running_server() as running, grpc.insecure_channel(running.address) as channel:
        stub = worker_pb2_grpc.GenerationServiceStub(channel)
        overall, service = watch(channel), watch(channel, SERVICE_NAME)
        assert (next(overall), next(service)) == (STATUS.NOT_SERVING, STATUS.NOT_SERVING)
        assert check(channel) == check(channel, SERVICE_NAME) == STATUS.NOT_SERVING
        for call in (
            lambda: stub.Generate(REQUEST, timeout=PATIENCE_S),
            lambda: next(stub.GenerateStream(pb.GenerateStreamRequest(request=REQUEST), timeout=PATIENCE_S)),
            lambda: stub.Tokenize(pb.TokenizeRequest(), timeout=PATIENCE_S),
            lambda: stub.Detokenize(pb.DetokenizeRequest(), timeout=PATIENCE_S),
            lambda: stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=PATIENCE_S),
        ):
            error = refusal(call)
            assert isinstance(error, UnavailableError)
            assert "loading" in str(error)
        generator = FakeGenerator()
        running.call(running.server.set_ready(generator))
        assert (next(overall), next(service)) == (STATUS.SERVING, STATUS.SERVING)
        assert stub.Generate(REQUEST, timeout=PATIENCE_S).choices[0].text == "w0 w1 "
        running.call(running.server.drain(asyncio.Event()))
        assert (next(overall), next(service)) == (STATUS.NOT_SERVING, STATUS.NOT_SERVING)
        assert "shutting down" in str(refusal(lambda: stub.Generate(REQUEST, timeout=PATIENCE_S)))
        generator.close()


def test_a_full_queue_does_not_change_health():
    generator = FakeGenerator(free_running=False, capacity=1)
    with running_server(generator) as running, grpc.insecure_channel(running.address) as channel:
        stub = worker_pb2_grpc.GenerationServiceStub(channel)
        held = stub.Generate.future(REQUEST, timeout=PATIENCE_S)
        generator.wait_for(lambda g: g.live_ids)
        with pytest.raises(grpc.RpcError, match="1 requests are live"):
            stub.Generate(REQUEST, timeout=PATIENCE_S)
        assert check(channel, SERVICE_NAME) == STATUS.SERVING
        generator.run_freely()
        assert held.result(PATIENCE_S).choices[0].text == "w0 w1 "


def test_reflection_lists_the_service_and_its_methods():
    with running_server() as running, grpc.insecure_channel(running.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE_NAME, "grpc.health.v1.Health"} <= set(database.get_services())
        [service] = database.FindFileContainingSymbol(SERVICE_NAME).service
    assert [m.name for m in service.method] == [
        "Generate",
        "GenerateStream",
        "Score",
        "Embed",
        "Tokenize",
        "Detokenize",
        "GetModelInfo",
        "GetLoad",
        "Abort",
    ]


def test_every_method_of_the_contract_is_implemented():
    with running_server() as running, grpc.insecure_channel(running.address) as channel:
        for method in pb.DESCRIPTOR.services_by_name["GenerationService"].methods:
            path = f"/{SERVICE_NAME}/{method.name}"
            if method.name in ("GetLoad", "Abort"):  # answered while loading, too
                assert isinstance(channel.unary_unary(path)(b"", timeout=PATIENCE_S), bytes)
                continue
            call = channel.unary_stream(path)(b"", timeout=PATIENCE_S)
            assert call.code() is grpc.StatusCode.UNAVAILABLE, method.name


# serve(), in this process.


def run_serve(open_generator, config=ServerConfig(port=0, drain_timeout_s=PATIENCE_S)):  # noqa: B008 - frozen
    events = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        asyncio.run(
            serve(
                open_generator,
                config,
                on_bound=lambda address: events.append(("bound", address)),
                on_ready=lambda address: events.append(("ready", address)),
            )
        )
    finally:
        assert signal.getsignal(signal.SIGTERM) is before
    return events


def test_a_failed_load_ends_the_worker_with_its_own_error():
    def load():
        raise ArtifactError("no artifact there")

    with pytest.raises(ArtifactError, match="no artifact there"):
        run_serve(load)


def test_a_taken_port_fails_before_the_load():
    loads = []
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortError):
        run_serve(lambda: loads.append(1), ServerConfig(port=taken.getsockname()[1]))
    assert loads == []


def test_a_signal_during_the_load_ends_the_worker_once_loaded():
    generator = FakeGenerator()

    def load():
        os.kill(os.getpid(), signal.SIGTERM)
        return generator

    assert [name for name, _ in run_serve(load)] in (["bound"], ["bound", "ready"])
    assert generator.closed


def test_a_second_signal_does_not_wait_for_the_load():
    never = threading.Event()

    def load():
        os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=second, daemon=True).start()
        assert never.wait(PATIENCE_S)
        return FakeGenerator()

    def second():
        with grpc.insecure_channel(events[0]) as channel:
            stub = worker_pb2_grpc.GenerationServiceStub(channel)
            while "shutting down" not in str(refusal(lambda: stub.Generate(REQUEST, timeout=PATIENCE_S))):
                pass
        os.kill(os.getpid(), signal.SIGINT)

    events: list[str] = []
    asyncio.run(serve(load, ServerConfig(port=0, drain_timeout_s=600), on_bound=events.append))
    never.set()


# serve(), in a process of its own.


@contextmanager
def worker_process(mode, drain_timeout_s):
    """The fake worker as a process; yields it and its address, and kills what is left of it."""
    command = [sys.executable, "-m", "support.fakes.generator", mode, str(drain_timeout_s)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=with_scripts()
    ) as process:
        try:
            bound = process.stdout.readline().split()
            assert process.stdout.readline().split() == ["READY", bound[1]]
            yield process, bound[1]
        finally:
            process.kill()


def await_taken(process, count):
    """Return once so many requests are live in a worker that is stuck."""
    process.stdin.write(f"{count}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "TAKEN\n"


def ended_cleanly(process):
    assert process.stdout.readline() == "CLOSED\n"
    return process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_running_stream_finishes_before_the_process_ends(number):
    with worker_process("steps", PATIENCE_S) as (process, address), open_stub(address) as stub:
        responses = stub.GenerateStream(pb.GenerateStreamRequest(request=REQUEST), timeout=PATIENCE_S)

        def step():
            process.stdin.write("\n")
            process.stdin.flush()

        step()
        assert next(responses).text == "w0 "
        with grpc.insecure_channel(address) as channel:
            statuses = watch(channel)
            assert next(statuses) == STATUS.SERVING
            process.send_signal(number)
            assert next(statuses) == STATUS.NOT_SERVING
        assert isinstance(refusal(lambda: stub.Generate(REQUEST, timeout=PATIENCE_S)), UnavailableError)
        step()
        assert [m.text for m in responses] == ["w1 "]
        assert ended_cleanly(process)


def test_what_does_not_finish_in_time_ends_unavailable():
    with worker_process("stuck", 0.2) as (process, address), open_stub(address) as stub:
        responses = stub.GenerateStream(pb.GenerateStreamRequest(request=REQUEST), timeout=PATIENCE_S)
        whole = stub.Generate.future(REQUEST, timeout=PATIENCE_S)
        await_taken(process, 2)
        process.terminate()
        for call in (lambda: next(responses), lambda: whole.result(PATIENCE_S)):
            error = refusal(call)
            assert isinstance(error, UnavailableError)
            assert "shut" in str(error)
        assert ended_cleanly(process)


def test_a_call_that_is_still_to_be_read_when_all_are_ended_is_told_too(monkeypatch):
    generator, forced = FakeGenerator(free_running=False), asyncio.Event()
    forced.set()
    with running_server(generator) as running, open_stub(running.address) as stub:
        desk = running.server._desk
        with held_up(desk, monkeypatch) as queued:
            answer = stub.Generate.future(REQUEST, timeout=PATIENCE_S)
            assert queued.wait(PATIENCE_S)
            running.call(running.server.drain(forced))
            assert isinstance(refusal(answer.result), UnavailableError)
        generator.wait_for(lambda g: g.submitted and not g.live_ids)


def test_a_second_signal_forces_the_end():
    with worker_process("stuck", 600) as (process, address), grpc.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.GenerationServiceStub(channel)
        responses = stub.GenerateStream(pb.GenerateStreamRequest(request=REQUEST), timeout=PATIENCE_S)
        statuses = watch(channel)
        assert next(statuses) == STATUS.SERVING
        await_taken(process, 1)
        process.terminate()
        assert next(statuses) == STATUS.NOT_SERVING
        process.terminate()
        assert isinstance(refusal(lambda: next(responses)), UnavailableError)
        assert ended_cleanly(process)
