"""The asyncio client against a real server: every method, and what it does where the other client blocks."""

from __future__ import annotations

import asyncio

import pytest

from llorch_serve.client.asynchronous import AsyncWorkerClient
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.client.channel import Access
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import (
    AuthenticationError,
    CancelledError,
    InvalidRequestError,
    UnavailableError,
    WorkerError,
)
from llorch_serve.requests import GenerationRequest, ScoreRequest, TextPrompt
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.security import Security
from llorch_serve.sampling.params import SamplingParams
from support.fakes.generator import INFO, LOAD, PATIENCE_S, FakeGenerator
from support.harness.rpc import running_server


def request(name="r", tokens=3, **sampling):
    return GenerationRequest(name, TextPrompt("Hi"), SamplingParams(max_tokens=tokens, **sampling))


def run(story, generator=None, access=None, **config):
    """Run a story with an asyncio client on a loop of its own."""

    async def main(address):
        async with AsyncWorkerClient(address, access or Access()) as client:
            return await asyncio.wait_for(story(client), PATIENCE_S)

    with running_server(generator, **config) as running:
        return asyncio.run(main(running.address))


def test_both_clients_have_the_same_methods_one_for_each_rpc():
    names = {n for n in dir(AsyncWorkerClient) if not n.startswith("_")}
    assert names == {n for n in dir(WorkerClient) if not n.startswith("_")}
    methods = {m.name for m in pb.DESCRIPTOR.services_by_name["GenerationService"].methods}
    of_rpc = {
        "Generate": "complete",
        "GenerateStream": "generate",
        "Score": "score",
        "Embed": "embed",
        "Tokenize": "tokenize",
        "Detokenize": "detokenize",
        "GetModelInfo": "model_info",
        "GetLoad": "load",
        "Abort": "abort",
    }
    assert set(of_rpc) == methods
    assert set(of_rpc.values()) <= names


def test_every_method_answers():
    async def story(client):
        await client.wait_until_ready(PATIENCE_S)
        updates = [update async for update in client.generate(request())]
        return (
            "".join(update.text for update in updates),
            updates[-1].completion.reason,
            await client.complete(request()),
            await client.score(ScoreRequest("s", TextPrompt("Hi"), (TextPrompt("a"), TextPrompt("bcd")))),
            await client.tokenize(TextPrompt("Hi")),
            await client.detokenize((72, 105)),
            await client.model_info(),
            await client.load(),
            await client.abort("nobody"),
        )

    streamed, reason, [whole], scores, *others = run(story, FakeGenerator())
    assert (streamed, reason) == (whole.text, whole.completion.reason) == ("w0 w1 w2 ", FinishReason.LENGTH)
    assert whole.token_ids == (0, 1, 2)
    assert [(score.logprob, score.token_count) for score in scores] == [(-1, 1), (-3, 3)]
    assert others == [((72, 105), "Hi"), "Hi", INFO, LOAD, ()]


def test_streams_share_a_loop_and_one_can_be_aborted():
    generator = FakeGenerator(free_running=False)

    async def story(client):
        async def collect(name):
            return [update.text async for update in client.generate(request(name))]

        tasks = {name: asyncio.create_task(collect(name)) for name in ("a", "b")}
        await asyncio.to_thread(generator.wait_for, lambda g: len(g.live_ids) == 2)
        assert await client.abort("a", "c") == ("a",)
        with pytest.raises(CancelledError):
            await tasks["a"]
        generator.run_freely()
        return "".join(await tasks["b"])

    assert run(story, generator) == "w0 w1 w2 "


def test_leaving_a_stream_or_cancelling_its_task_ends_the_request():
    generator = FakeGenerator(free_running=False)

    async def story(client):
        stream = client.generate(request("left"))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(generator.wait_for, lambda g: g.live_ids)
        generator.step()
        assert (await first).text == "w0 "
        await stream.aclose()
        await asyncio.to_thread(generator.wait_for, lambda g: g.aborted == ["left"])
        task = asyncio.create_task(client.complete(request("cancelled")))
        await asyncio.to_thread(generator.wait_for, lambda g: g.live_ids == ["cancelled"])
        task.cancel()
        await asyncio.to_thread(generator.wait_for, lambda g: g.aborted == ["left", "cancelled"])

    run(story, generator)


def test_errors_are_those_of_the_worker():
    async def bad(client):
        with pytest.raises(InvalidRequestError) as caught:
            await client.complete(request(temperature=-1))
        with pytest.raises(InvalidRequestError, match=r"sampling\.top_p"):
            [u async for u in client.generate(request(top_p=7))]
        with pytest.raises(InvalidRequestError, match="takes at most"):
            await client.tokenize(TextPrompt("a" * 17 * 2**20))
        return [v.field for v in caught.value.violations]

    assert run(bad, FakeGenerator()) == ["sampling.temperature"]

    async def token(client):
        with pytest.raises(AuthenticationError):
            await client.load()

    run(token, FakeGenerator(), security=Security(tokens=("one",)))
    run(AsyncWorkerClient.load, FakeGenerator(), Access(token="one"), security=Security(tokens=("one",)))


def test_waiting_for_one_that_loads_and_one_that_is_not_there():
    async def loading(client):
        with pytest.raises(UnavailableError, match="not ready"):
            await client.wait_until_ready(0.2)

    run(loading)

    async def nobody():
        async with AsyncWorkerClient("127.0.0.1:1") as client:
            with pytest.raises(WorkerError, match="no worker answers"):
                await client.wait_until_ready(0.2)
            with pytest.raises(WorkerError, match="no worker answers"):
                await client.load()

    asyncio.run(nobody())
