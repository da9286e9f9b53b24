"""What clients do to a worker, by mistake or on purpose: it stays alive, and everything they held is free
again.
"""

from __future__ import annotations

import random
import socket
import threading
import time

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from llorch_serve.calls.admission import POOL_THREADS
from llorch_serve.rpc import SERVICE_NAME, worker_pb2_grpc
from llorch_serve.rpc import worker_pb2 as pb
from support.fakes.session import continuation
from support.harness.rpc import open_stub, running_server
from support.harness.worker import PATIENCE_S, VOCAB, make_session, make_worker

MIB = 2**20


def ask(ids, tokens, **call):
    sampling = pb.Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
    return pb.GenerateRequest(input=pb.Input(tokens=pb.TokenInput(ids=ids)), sampling=sampling, **call)


@pytest.fixture
def address(tmp_path):
    worker = make_worker(tmp_path, make_session(slots=2))
    try:
        with running_server(worker) as running:
            yield running.address
    finally:
        worker.close()


def answers(stub):
    got = stub.Generate(ask((8, 8), 3), timeout=PATIENCE_S).choices[0].token_ids
    return list(got) == continuation((8, 8), 3, VOCAB)


@pytest.mark.parametrize("megabytes", [3.9, 5, 100])
def test_messages_of_any_size_get_a_status_that_says_why(address, megabytes):
    text = "a" * int(megabytes * MIB)  # one word, which takes a tokenizer seconds
    with open_stub(address, max_send_message_length=-1) as stub:
        call = stub.Generate.future(pb.GenerateRequest(input=pb.Input(text=text)), timeout=PATIENCE_S)
        if megabytes < 4:
            assert call.code() is grpc.StatusCode.INVALID_ARGUMENT  # read, and longer than the context
            assert f"found {len(text)} characters; the context holds 48 tokens" in call.details()
        elif megabytes < 16:
            assert call.code() is grpc.StatusCode.INVALID_ARGUMENT  # refused before it is parsed
            assert (
                f"found {len(text)} bytes in text, expected at most {4 * MIB} in one text" in call.details()
            )
        else:
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(16 * MIB) in call.details()
        assert answers(stub)


@pytest.mark.parametrize(
    "garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(256)) * 8]
)
def test_bytes_that_are_no_call(address, garbage):
    host, port = address.rsplit(":", 1)
    for _ in range(20):
        with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
    with open_stub(address) as stub:
        assert answers(stub)


def test_clients_that_leave_at_any_moment_leave_nothing_behind(address):
    chance, process = random.Random(7), psutil.Process()
    with open_stub(address) as stub:
        assert answers(stub)
        # The pool starts another thread when all it has are at work.
        threads = threading.active_count() + POOL_THREADS - 1

        def gone(method, deadline):
            with grpc.insecure_channel(address) as channel:
                other = worker_pb2_grpc.GenerationServiceStub(channel)
                request = ask([9] * chance.randint(1, 16), 30)
                if method == "stream":
                    call = other.GenerateStream(pb.GenerateStreamRequest(request=request), timeout=deadline)
                    if chance.random() < 0.5:
                        next(call)
                else:
                    call = other.Generate.future(request, timeout=deadline)
                if chance.random() < 0.5:
                    call.cancel()

        descriptors = None
        for round_ in range(50):
            gone(chance.choice(["stream", "whole"]), PATIENCE_S)
            if round_ == 9:
                descriptors = process.num_fds()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            load = stub.GetLoad(pb.GetLoadRequest(), timeout=PATIENCE_S)
            if (load.running, load.waiting, load.kv_tokens_running) == (0, 0, 0):
                break
            assert time.monotonic() < deadline, load
        assert answers(stub)
        while threading.active_count() > threads or process.num_fds() > descriptors + 4:
            assert time.monotonic() < deadline, (threading.enumerate(), process.num_fds(), descriptors)


def test_health_answers_while_a_prompt_is_prefilled(tmp_path):
    held, reached = threading.Event(), threading.Event()

    def before(_call):
        reached.set()
        assert held.wait(PATIENCE_S)

    worker = make_worker(tmp_path, make_session(before_call=before))
    try:
        with running_server(worker) as running, grpc.insecure_channel(running.address) as channel:
            call = worker_pb2_grpc.GenerationServiceStub(channel).Generate.future(
                ask((1,), 1), timeout=PATIENCE_S
            )
            assert reached.wait(PATIENCE_S)
            for _ in range(20):
                request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
                assert health_pb2_grpc.HealthStub(channel).Check(request, timeout=1).status == 1
            held.set()
            assert call.result(PATIENCE_S).choices[0].token_ids
    finally:
        held.set()
        worker.close()
