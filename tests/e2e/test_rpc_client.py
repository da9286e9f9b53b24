"""The typed client against a real server: the same types and errors as a generator in this process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from llorch_serve.client.asynchronous import AsyncWorkerClient
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import (
    CancelledError,
    FieldViolation,
    InvalidRequestError,
    QueueFullError,
    UnavailableError,
    WorkerError,
)
from llorch_serve.requests import ChatMessage, ChatPrompt, GenerationRequest, TextPrompt, Timings, TokenPrompt
from llorch_serve.rpc import MAX_MESSAGE_BYTES, health
from llorch_serve.sampling.params import SamplingParams
from support.fakes.generator import INFO, LOAD, PATIENCE_S, FakeGenerator
from support.harness.rpc import running_server

pytestmark = pytest.mark.usefixtures("way")


def request(request_id="a", prompt=TextPrompt("Hello"), **sampling):  # noqa: B008 - frozen
    sampling.setdefault("max_tokens", 3)
    return GenerationRequest(request_id, prompt, SamplingParams(**sampling))


@pytest.fixture
def generator():
    return FakeGenerator()


@pytest.fixture
def client(generator):
    with running_server(generator) as running, WorkerClient(running.address) as client:
        yield client


def test_updates_arrive_as_the_generator_made_them(client):
    updates = list(client.generate(request(seed=9, stop=("w2",))))
    assert "".join(u.text for u in updates) == "w0 w1 "
    assert [i for u in updates for i in u.token_ids] == [0, 1]
    assert {u.request_id for u in updates} == {"a"}
    assert [u.is_last for u in updates] == [False] * (len(updates) - 1) + [True]
    completion = updates[-1].completion
    assert (completion.reason, completion.stop_matched, completion.seed) == (FinishReason.STOP, "w2", 9)
    assert (completion.prompt_tokens, completion.generated_tokens) == (5, 2)
    assert completion.timings == Timings(0.25, 0.5, 1.75)


def test_the_generator_gets_what_was_asked(client, generator):
    prompts = [TextPrompt("é"), TokenPrompt((1, 2)), ChatPrompt((ChatMessage("user", "Hi"),))]
    asked = [
        request(f"r{i}", p, temperature=0.7, top_p=0.9, seed=1, stop=("x",)) for i, p in enumerate(prompts)
    ]
    for one in asked:
        list(client.generate(one))
    assert [replace(one, client_id="") for one in generator.submitted] == asked
    (connection,) = {one.client_id for one in generator.submitted}
    assert connection.startswith("ipv4:127.0.0.1:")
    list(client.generate(replace(asked[0], client_id="me")))
    assert generator.submitted[-1].client_id == "me"


def test_the_other_methods(client):
    assert client.tokenize(TextPrompt("Hé")) == ((72, 195, 169), "Hé")
    assert client.tokenize(ChatPrompt((ChatMessage("user", "Hi"),)))[1] == "<user>Hi"
    assert client.detokenize((72, 2)) == "H"
    assert client.detokenize((72, 2), keep_special_tokens=True) == "H\x02"
    assert client.model_info() == INFO
    assert client.load() == LOAD


def test_threads_share_a_client(client):
    def text(n):
        return "".join(u.text for u in client.generate(request(f"r{n}", max_tokens=n)))

    with ThreadPoolExecutor(8) as pool:
        for n, answer in enumerate(pool.map(text, range(1, 41)), start=1):
            assert answer == "".join(f"w{i} " for i in range(n))


def test_violations_come_back_whole(client):
    with pytest.raises(InvalidRequestError) as caught:
        list(client.generate(request(temperature=3.0, stop=("",))))
    assert caught.value.violations == (
        FieldViolation("sampling.temperature", "found 3.0, expected a number from 0 to 2"),
        FieldViolation("sampling.stop[0]", "found '0 bytes', expected 1 to 1024 bytes"),
    )
    with pytest.raises(InvalidRequestError, match="token_ids: found 999"):
        client.detokenize((999,))


def test_a_full_queue_comes_back_with_its_delay(client, generator):
    generator.fail_submit = QueueFullError("full", retry_after_s=1.5)
    with pytest.raises(QueueFullError, match="full") as caught:
        list(client.generate(request()))
    assert caught.value.retry_after_s == 1.5


def test_what_no_worker_takes_is_not_sent(client, generator):
    with pytest.raises(InvalidRequestError, match=f"a worker takes at most {MAX_MESSAGE_BYTES}"):
        client.generate(request(prompt=TextPrompt("a" * MAX_MESSAGE_BYTES)))
    with pytest.raises(InvalidRequestError, match=r"input\.text: cannot be sent"):
        client.tokenize(TextPrompt("\ud800"))
    assert generator.submitted == []


def test_leaving_an_iterator_early_cancels_the_request(client, generator):
    updates = client.generate(request(max_tokens=None))
    next(updates)
    updates.close()
    generator.wait_for(lambda g: g.aborted == ["a"] and not g.live_ids)


def test_a_stream_in_another_thread_ends_when_the_client_is_closed():
    generator = FakeGenerator(free_running=False)
    with running_server(generator) as running:
        client = WorkerClient(running.address)
        caught = []

        def read():
            try:
                list(client.generate(request()))
            except CancelledError as error:
                caught.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        generator.wait_for(lambda g: g.live_ids)
        client.close()
        reader.join(20)
        assert not reader.is_alive()
        assert len(caught) == 1
        generator.wait_for(lambda g: not g.live_ids)


def test_a_deadline_names_the_worker():
    with (
        running_server(FakeGenerator(free_running=False)) as running,
        WorkerClient(running.address) as client,
        pytest.raises(WorkerError, match=f"{running.address} did not finish in time"),
    ):
        list(client.generate(request(), timeout_s=0.2))


def test_a_bug_on_the_worker_keeps_its_error_id(client, generator, caplog):
    generator.fail_step = RuntimeError("secret")
    with pytest.raises(WorkerError, match=r"answered INTERNAL: internal error; .* error id [0-9a-f]{8}"):
        list(client.generate(request()))
    assert "secret" in caplog.text


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
    with WorkerClient(address) as client:
        with pytest.raises(WorkerError, match=f"no worker answers at {address} .*llorch serve"):
            client.model_info()
        with pytest.raises(WorkerError, match=f"no worker answers at {address}"):
            list(client.generate(request()))
        with pytest.raises(WorkerError, match=f"no worker answers at {address} after 0.2 s"):
            client.wait_until_ready(0.2)


def test_waiting_for_a_worker_that_loads():
    generator = FakeGenerator()
    with running_server() as running, WorkerClient(running.address) as client:
        with pytest.raises(UnavailableError, match=r"not ready after 0\.2 s"):
            client.wait_until_ready(0.2)
        with pytest.raises(UnavailableError, match="loading"):
            client.model_info()
        waiting = ThreadPoolExecutor(1)
        ready = waiting.submit(client.wait_until_ready, 20)
        running.call(running.server.set_ready(generator))
        ready.result(20)
        assert client.model_info() == INFO
        waiting.shutdown()
        generator.close()


def test_clients_that_wait_for_a_worker_give_way_to_each_other_and_all_hear_of_it(monkeypatch):
    monkeypatch.setattr(health, "MAX_WATCHERS", 1)

    async def wait(address):
        async with AsyncWorkerClient(address) as client:
            await client.wait_until_ready(PATIENCE_S)

    with running_server() as running, ThreadPoolExecutor(3) as waiting:
        clients = [WorkerClient(running.address) for _ in "12"]
        ready = [waiting.submit(client.wait_until_ready, PATIENCE_S) for client in clients]
        ready.append(waiting.submit(asyncio.run, wait(running.address)))
        done, _ = concurrent.futures.wait(ready, 0.5, concurrent.futures.FIRST_COMPLETED)
        assert [one.result() for one in done] == []
        generator = FakeGenerator()
        running.call(running.server.set_ready(generator))
        for one in ready:
            one.result(PATIENCE_S)
        for client in clients:
            client.close()
        generator.close()
