"""One request's failure is its own; a dead engine is nobody's worker. Through a real channel."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from llorch_serve.errors import EngineStoppedError, ResourceError
from llorch_serve.lifecycle.serving import serve
from llorch_serve.rpc import SERVICE_NAME, worker_pb2_grpc
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.server import ServerConfig
from llorch_serve.sampling.sampler import SamplingRow
from llorch_serve.text.tokenizer import TextStream
from support.fakes.session import continuation
from support.harness.processes import with_scripts
from support.harness.rpc import open_stub, running_server
from support.harness.worker import PATIENCE_S, VOCAB, make_session, make_worker

STATUS = health_pb2.HealthCheckResponse
BAD, GOOD = (13, 1), ((14, 1), (15, 1), (16, 1))
THIRD = continuation(BAD, 3, VOCAB)[2]


def greedy(ids, tokens=8):
    sampling = pb.Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
    return pb.GenerateRequest(input=pb.Input(tokens=pb.TokenInput(ids=ids)), sampling=sampling)


def spoil_logits(_monkeypatch):
    def edit(call, logits):
        for row, tokens in zip(logits, call.tokens, strict=False):
            if tokens[:1] == BAD[:1] and len(tokens) == 4:
                row[3] = np.nan

    return {"edit": edit}


def break_tokenizer(monkeypatch):
    push = TextStream.push

    def failing(self, token_id):
        if token_id == THIRD:
            raise UnicodeError("a secret of the prompt")
        return push(self, token_id)

    monkeypatch.setattr(TextStream, "push", failing)
    return {}


def exhaust_sampling(monkeypatch):
    append = SamplingRow.append

    def failing(self, token_id):
        if token_id == THIRD:
            raise MemoryError("a secret of the prompt")
        append(self, token_id)

    monkeypatch.setattr(SamplingRow, "append", failing)
    return {}


def exhaust_prefill(_monkeypatch):
    def before(call):
        if call.kind == "prefill" and call.tokens[0][:1] == BAD[:1]:
            raise MemoryError("a secret of the prompt")

    return {"before_call": before}


def fill_device(_monkeypatch):
    def before(call):
        if call.kind == "prefill" and call.tokens[0][:1] == BAD[:1]:
            raise ResourceError("a secret of the device")

    return {"before_call": before}


@pytest.mark.parametrize(
    "fault", [spoil_logits, break_tokenizer, exhaust_sampling, exhaust_prefill, fill_device]
)
def test_a_requests_failure_is_its_own(tmp_path, monkeypatch, caplog, fault):
    worker = make_worker(tmp_path, make_session(**fault(monkeypatch)))
    try:
        with running_server(worker) as running, open_stub(running.address) as stub:
            calls = [stub.Generate.future(greedy(ids), timeout=PATIENCE_S) for ids in (BAD, *GOOD)]
            assert [list(call.result().choices[0].token_ids) for call in calls[1:]] == [
                continuation(ids, 8, VOCAB) for ids in GOOD
            ]
            full = fault is fill_device
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if full else grpc.StatusCode.INTERNAL
            assert calls[0].code() is code
            assert "secret" not in calls[0].details()
            load = stub.GetLoad(pb.GetLoadRequest(), timeout=PATIENCE_S)
            assert (load.running, load.waiting, load.kv_tokens_running) == (0, 0, 0)
            again = stub.Generate(greedy(GOOD[0]), timeout=PATIENCE_S)
            assert list(again.choices[0].token_ids) == continuation(GOOD[0], 8, VOCAB)
    finally:
        worker.close()
    if fault is not spoil_logits:
        assert any(
            record.exc_info and record.message.split()[-1] in calls[0].details() for record in caplog.records
        )


def test_a_dead_engine_ends_calls_health_and_worker(tmp_path, caplog):
    """The whole of serve() around a real worker whose engine meets what it does not expect."""
    released = threading.Event()

    def before(_call):
        assert released.wait(PATIENCE_S)
        raise RuntimeError("a secret of the prompt")

    addresses, statuses, codes = [], [], []

    def client():
        with grpc.insecure_channel(addresses[0]) as channel, ThreadPoolExecutor() as pool:
            stub = worker_pb2_grpc.GenerationServiceStub(channel)
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=PATIENCE_S)
            statuses.append(next(watch).status)
            running = [stub.Generate.future(greedy(ids), timeout=PATIENCE_S) for ids in GOOD]
            streams = [
                stub.GenerateStream(pb.GenerateStreamRequest(request=greedy(ids)), timeout=PATIENCE_S)
                for ids in GOOD
            ]
            while len(worker._requests._live) < 6:  # all are submitted, and the first is in its prefill
                pass
            released.set()
            statuses.append(next(watch).status)
            codes.extend((call.code(), call.details()) for call in running)
            codes.extend(pool.map(lambda s: (s.code(), s.details()), streams))

    def ready(address):
        addresses.append(address)
        thread.start()

    thread = threading.Thread(target=client, daemon=True)
    worker = make_worker(tmp_path, make_session(before_call=before))
    with pytest.raises(EngineStoppedError) as caught:
        asyncio.run(serve(lambda: worker, ServerConfig(port=0), on_ready=ready))
    thread.join(PATIENCE_S)
    assert statuses == [STATUS.SERVING, STATUS.NOT_SERVING]
    assert codes == [(grpc.StatusCode.INTERNAL, str(caught.value))] * 6
    assert "secret" not in str(caught.value)
    [record] = [r for r in caplog.records if r.exc_info and r.name.startswith("llorch")]
    assert "secret" in str(record.exc_info[1])


def test_a_process_with_a_dead_engine_exits_with_an_error():
    command = [sys.executable, "-m", "support.fakes.generator", "dying", "600"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=with_scripts()
    ) as process:
        try:
            address = process.stdout.readline().split()[1]
            assert process.stdout.readline().startswith("READY")
            with open_stub(address) as stub:
                call = stub.GenerateStream(pb.GenerateStreamRequest(request=greedy((1,))), timeout=PATIENCE_S)
                process.stdin.write("\n")
                process.stdin.flush()
                assert call.code() is grpc.StatusCode.INTERNAL
                assert "4711" in call.details()
            assert process.wait(PATIENCE_S) == 1
            assert "EngineStoppedError" in process.stderr.read()
        finally:
            process.kill()
