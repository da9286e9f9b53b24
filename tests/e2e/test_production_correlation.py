"""The caller's own ids over gRPC: told back with the answer, and known to logs and spans."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest

from llorch_serve.calls.correlation import plain_id
from llorch_serve.client.asynchronous import AsyncWorkerClient
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.errors import InvalidRequestError
from llorch_serve.observe.logs import FIELDS
from llorch_serve.observe.narration import Narrator
from llorch_serve.observe.tap import ObservedGenerator
from llorch_serve.requests import GenerationRequest, ScoreRequest, TextPrompt
from llorch_serve.rpc import SERVICE_NAME
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.sampling.params import SamplingParams
from support.fakes.generator import PATIENCE_S, FakeGenerator
from support.harness.rpc import open_stub, running_server

CALL = pb.GenerateRequest(input=pb.Input(text="ab"), sampling=pb.Sampling(max_tokens=2))
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HOSTILE = 'a "b" \\ c'


@pytest.fixture
def worker():
    generator = FakeGenerator()
    with running_server(generator) as running:
        yield running.address, generator


@pytest.mark.parametrize(
    ("sent", "known"),
    [
        ([("x-correlation-id", "c-1")], "c-1"),
        ([("x-request-id", "r-1")], "r-1"),
        ([("x-request-id", "r-1"), ("x-correlation-id", "c-1")], "c-1"),
        ([("x-correlation-id", HOSTILE)], plain_id(HOSTILE)),
        ([("x-correlation-id", "a" * 129)], plain_id("a" * 129)),
        ([], ""),
    ],
)
@pytest.mark.parametrize("shape", ["whole", "stream"])
def test_an_id_comes_back_and_goes_with_the_request(worker, sent, known, shape):
    address, generator = worker
    with open_stub(address) as stub:
        if shape == "whole":
            _, call = stub.Generate.with_call(CALL, timeout=PATIENCE_S, metadata=sent)
        else:
            call = stub.GenerateStream(
                pb.GenerateStreamRequest(request=CALL), timeout=PATIENCE_S, metadata=sent
            )
            assert list(call)
    told = {key: value for key, value in call.initial_metadata() if key.startswith("x-")}
    assert told == ({"x-correlation-id": known, "x-request-id": known} if known else {})
    assert generator.submitted[0].correlation_id == known


def test_an_id_that_is_not_plain_is_told_as_a_digest():
    assert plain_id("a" * 128) == "a" * 128
    assert len(plain_id(HOSTILE)) == 16
    assert plain_id(HOSTILE) != plain_id(HOSTILE + "!")
    assert plain_id("\n").isalnum()


@pytest.mark.parametrize(
    "method", [m.name for m in pb.DESCRIPTOR.services_by_name["GenerationService"].methods]
)
def test_refusals_of_every_method_bring_it_back_too(method):
    with running_server() as running, grpc.insecure_channel(running.address) as channel:  # still loading
        sent = (("x-correlation-id", "c-2"),)
        call = channel.unary_stream(f"/{SERVICE_NAME}/{method}")(b"", timeout=PATIENCE_S, metadata=sent)
        assert ("x-correlation-id", "c-2") in call.initial_metadata()
        if method in ("GetLoad", "Abort"):
            assert len(list(call)) == 1
        else:
            assert call.code() is grpc.StatusCode.UNAVAILABLE


def test_both_clients_send_what_a_request_for_scores_says(worker):
    address, generator = worker
    request = ScoreRequest("s", TextPrompt("ab"), (TextPrompt("c"),), correlation_id="c-3", traceparent=TRACE)
    with WorkerClient(address) as client:
        client.score(request)

    async def ask():
        async with AsyncWorkerClient(address) as client:
            await client.score(request)

    asyncio.run(ask())
    assert [(r.correlation_id, r.traceparent) for r in generator.scored] == [("c-3", TRACE)] * 2


def asked(**ids):
    return GenerationRequest("r", TextPrompt("ab"), SamplingParams(max_tokens=2), **ids)


def test_both_clients_send_what_a_request_says(worker):
    address, generator = worker
    request = asked(correlation_id="c-3", traceparent=TRACE)

    async def over_asyncio():
        async with AsyncWorkerClient(address) as client:
            assert [update async for update in client.generate(request)]
            assert await client.complete(request)

    with WorkerClient(address) as client:
        assert list(client.generate(request))
        assert client.complete(request)
    asyncio.run(over_asyncio())
    found = [(seen.correlation_id, seen.traceparent) for seen in generator.submitted]
    assert found == [("c-3", TRACE)] * 4


@pytest.mark.parametrize("ids", [{"correlation_id": HOSTILE}, {"traceparent": "00-1"}])
def test_clients_refuse_ids_that_no_call_can_carry(worker, ids):
    [name] = ids
    with WorkerClient(worker[0]) as client, pytest.raises(InvalidRequestError, match=name):
        client.complete(asked(**ids))
    with WorkerClient(worker[0]) as client, pytest.raises(InvalidRequestError, match=name):
        client.generate(asked(**ids))


def test_the_log_has_it(caplog):
    generator = FakeGenerator()
    observed = ObservedGenerator(generator, [Narrator("w")])
    with caplog.at_level(logging.INFO), running_server(observed) as running:
        with open_stub(running.address) as stub:
            stub.Generate(CALL, timeout=PATIENCE_S, metadata=[("x-correlation-id", "c-4")])
        observed.settle()
        observed.close()
    fields = [getattr(record, FIELDS) for record in caplog.records if hasattr(record, FIELDS)]
    assert [f["correlation_id"] for f in fields if f["action"] == "inference.complete"] == ["c-4"]
