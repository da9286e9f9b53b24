"""The rest of the worker's contract through a real channel: abort, load, priority, fingerprint, limits,
deadlines.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import grpc
import pytest

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.config import EngineConfig
from llorch_serve.engine.load import WorkerState
from llorch_serve.errors import CancelledError, InvalidRequestError, ModelMismatchError, QueueFullError
from llorch_serve.lifecycle.serving import serve
from llorch_serve.loading.progress import LoadProgress
from llorch_serve.requests import GenerationRequest, TextPrompt, TokenPrompt
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.server import ServerConfig
from llorch_serve.rpc.status import read_status
from llorch_serve.sampling.params import SamplingParams
from support.fakes.generator import INFO, FakeGenerator
from support.fakes.session import continuation
from support.harness.routing import seen
from support.harness.rpc import open_stub, running_server
from support.harness.worker import CONTEXT, PATIENCE_S, VOCAB, make_session, make_worker

pytestmark = pytest.mark.usefixtures("way")

REQUEST = GenerationRequest("r", TextPrompt("Hi"), SamplingParams(max_tokens=2))


def wire(request_id, ids=(1, 2), tokens=4, **fields):
    sampling = pb.Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompt = pb.Input(tokens=pb.TokenInput(ids=ids))
    return pb.GenerateRequest(input=prompt, sampling=sampling, request_id=request_id, **fields)


def busy_with(stub):
    load = stub.GetLoad(pb.GetLoadRequest(), timeout=PATIENCE_S)
    return load.running, load.waiting


def error_of(call):
    return read_status(call.exception(PATIENCE_S), address="here")


@pytest.fixture
def stepped():
    generator = FakeGenerator(free_running=False, slots=1)
    with running_server(generator) as running, open_stub(running.address) as stub:
        yield generator, stub


# Abort.


def test_an_abort_ends_running_and_queued_requests_and_may_be_repeated(stepped):
    generator, stub = stepped
    calls = {}
    for name in ("running", "queued", "kept"):
        calls[name] = stub.Generate.future(wire(name), timeout=PATIENCE_S)
        generator.wait_for(lambda g, name=name: name in g.live_ids)
    ids = ["running", "never", "queued", "running"]
    assert stub.Abort(pb.AbortRequest(request_ids=ids)).request_ids == ["running", "queued"]
    for name in ("running", "queued"):
        assert isinstance(error_of(calls[name]), CancelledError)
    assert stub.Abort(pb.AbortRequest(request_ids=ids), timeout=PATIENCE_S).request_ids == []
    generator.run_freely()
    assert calls["kept"].result(PATIENCE_S).choices[0].text == "w0 w1 w2 w3 "


def test_an_abort_reaches_a_request_whose_prompt_is_still_tokenised(stepped):
    generator, stub = stepped
    generator.submit_gate = threading.Event()
    call = stub.Generate.future(wire("early"), timeout=PATIENCE_S)
    generator.wait_for(lambda g: g.submitted)
    assert stub.Abort(pb.AbortRequest(request_ids=["early"]), timeout=PATIENCE_S).request_ids == ["early"]
    generator.submit_gate.set()
    assert isinstance(error_of(call), CancelledError)
    generator.wait_for(lambda g: g.live_ids == [])


def test_an_abort_names_its_bad_ids(stepped):
    _, stub = stepped
    call = stub.Abort.future(pb.AbortRequest(request_ids=["", "a", "b" * 129]), timeout=PATIENCE_S)
    assert [v.field for v in error_of(call).violations] == ["request_ids[0]", "request_ids[2]"]
    call = stub.Abort.future(pb.AbortRequest(request_ids=["a"] * 1025), timeout=PATIENCE_S)
    assert [v.field for v in error_of(call).violations] == ["request_ids"]


# Load and state.


def test_load_tells_progress_and_state_from_the_first_moment_to_the_last():
    progress = LoadProgress()
    gate, loads = threading.Event(), []

    def load():
        progress.expect(1000)
        progress.advance(400)
        assert gate.wait(PATIENCE_S)
        return FakeGenerator(free_running=False)

    def watch(address):
        with WorkerClient(address) as client:
            while (now := client.load()).loaded_bytes == 0:
                pass
            loads.append(now)
            gate.set()
            client.wait_until_ready(PATIENCE_S)
            loads.append(client.load())
        os.kill(os.getpid(), signal.SIGTERM)

    def bound(address):
        threading.Thread(target=watch, args=(address,), daemon=True).start()

    asyncio.run(serve(load, ServerConfig(port=0, drain_timeout_s=0), progress=progress, on_bound=bound))
    starting, serving = loads
    assert (starting.state, starting.load_percent) == (WorkerState.STARTING, 36.0)
    assert (starting.loaded_bytes, starting.total_bytes, starting.slots) == (400, 1000, 0)
    assert (serving.state, serving.load_percent, serving.slots) == (WorkerState.READY, 100.0, 8)


def test_a_worker_is_busy_with_all_slots_taken_and_draining_answers_load(tmp_path, way):
    held, reached = threading.Event(), threading.Event()

    def before(_call):
        reached.set()
        assert held.wait(PATIENCE_S)

    worker = make_worker(tmp_path, make_session(slots=1, before_call=before))
    try:
        with running_server(worker) as running, open_stub(running.address) as stub:
            call = stub.Generate.future(wire("a"), timeout=PATIENCE_S)
            assert reached.wait(PATIENCE_S)
            busy = pb.WORKER_STATE_BUSY
            assert seen(way, lambda: stub.GetLoad(pb.GetLoadRequest()).state, busy) == busy
            drained = running.start(running.server.drain(asyncio.Event()))
            while stub.GetLoad(pb.GetLoadRequest(), timeout=PATIENCE_S).state != pb.WORKER_STATE_DRAINING:
                pass
            held.set()
            assert list(call.result(PATIENCE_S).choices[0].token_ids) == continuation((1, 2), 4, VOCAB)
            drained.result(PATIENCE_S)
    finally:
        held.set()
        worker.close()


# Who goes first, which model.


def test_priority_orders_what_waits(tmp_path):
    held, order = threading.Event(), []

    def before(call):
        assert held.wait(PATIENCE_S)
        if call.kind == "prefill":
            order.append(call.tokens[0][0])

    worker = make_worker(tmp_path, make_session(slots=1, before_call=before))
    try:
        with running_server(worker) as running, open_stub(running.address) as stub:
            calls = []
            for index, priority in enumerate((0, -1, 5, 5, 10)):
                request = wire(str(index), ids=(20 + index,), tokens=1, client_id="one", priority=priority)
                calls.append(stub.Generate.future(request, timeout=PATIENCE_S))
                while len(worker._requests._live) <= index:
                    pass
            held.set()
            for call in calls:
                call.result(PATIENCE_S)
    finally:
        held.set()
        worker.close()
    assert order == [20, 24, 22, 23, 21]  # the first had the slot before the others came


def test_a_priority_out_of_range_is_refused(stepped):
    generator, stub = stepped
    for priority in (11, -11, 2**31 - 1):
        call = stub.Generate.future(wire("a", priority=priority), timeout=PATIENCE_S)
        assert [v.field for v in error_of(call).violations] == ["priority"]
    assert generator.submitted == []


def test_the_fingerprint_must_be_the_served_models(stepped):
    generator, stub = stepped
    error = error_of(stub.Generate.future(wire("a", fingerprint="0" * 64), timeout=PATIENCE_S))
    assert isinstance(error, ModelMismatchError)
    assert INFO.fingerprint in str(error)
    generator.run_freely()
    assert stub.Generate(wire("b", fingerprint=INFO.fingerprint), timeout=PATIENCE_S).choices[0].text


def test_scores_are_held_to_the_same_conditions(stepped):
    generator, stub = stepped

    def score(**fields):
        return pb.ScoreRequest(
            context=pb.Input(text="Hi"), continuations=[pb.Continuation(text="a")], **fields
        )

    for field in ("model", "fingerprint"):
        error = error_of(stub.Score.future(score(**{field: "another"}), timeout=PATIENCE_S))
        assert isinstance(error, ModelMismatchError)
    error = error_of(stub.Score.future(score(priority=11), timeout=PATIENCE_S))
    assert [v.field for v in error.violations] == ["priority"]
    assert generator.scored == []
    stub.Score(score(priority=-3, fingerprint=INFO.fingerprint), timeout=PATIENCE_S)
    [scored] = generator.scored
    assert (scored.priority, scored.fingerprint) == (-3, INFO.fingerprint)


def test_an_abort_ends_all_answers_of_a_call(tmp_path, way):
    reached, held = threading.Event(), threading.Event()

    def before(_call):
        reached.set()
        assert held.wait(PATIENCE_S)

    worker = make_worker(tmp_path, make_session(slots=2, before_call=before))
    try:
        with running_server(worker) as running, open_stub(running.address) as stub:
            several, form = wire("several", tokens=30), wire("form", tokens=30)
            several.sampling.n = 4
            form.sampling.choice.options.append("yes")
            calls = [stub.Generate.future(message, timeout=PATIENCE_S) for message in (several, form)]
            assert reached.wait(PATIENCE_S)
            while len(worker._requests._live) < 2:
                pass
            ids = ["several", "form"]
            assert stub.Abort(pb.AbortRequest(request_ids=ids), timeout=PATIENCE_S).request_ids == ids
            held.set()
            for call in calls:
                assert isinstance(error_of(call), CancelledError)
            assert seen(way, lambda: busy_with(stub), (0, 0)) == (0, 0)
    finally:
        held.set()
        worker.close()


# What is refused, and how.


def test_fields_of_every_kind_are_named_together(tmp_path):
    worker = make_worker(tmp_path)
    request = wire("x" * 129, ids=[5] * CONTEXT, priority=99, client_id="")
    request.sampling.temperature = -1
    request.sampling.stop.append("")
    try:
        with running_server(worker) as running, open_stub(running.address) as stub:
            error = error_of(stub.Generate.future(request, timeout=PATIENCE_S))
            none = error_of(stub.Generate.future(pb.GenerateRequest(priority=99), timeout=PATIENCE_S))
    finally:
        worker.close()
    assert isinstance(error, InvalidRequestError)
    fields = {v.field for v in error.violations}
    assert {
        "request_id",
        "client_id",
        "priority",
        "sampling.temperature",
        "sampling.stop[0]",
        "input",
    } <= fields
    assert {v.field for v in none.violations} == {"input", "priority"}


def test_a_queue_is_bounded_by_tokens_too(tmp_path):
    held, reached = threading.Event(), threading.Event()

    def before(_call):
        reached.set()
        assert held.wait(PATIENCE_S)

    config = EngineConfig(prefill_chunk=4, max_waiting_tokens=10)
    worker = make_worker(tmp_path, make_session(slots=1, before_call=before), config=config)
    try:
        with running_server(worker) as running, WorkerClient(running.address) as client:
            calls = {}

            def ask(name, length):
                sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
                request = GenerationRequest(name, TokenPrompt((3,) * length), sampling)
                calls[name] = running.loop.run_in_executor(None, client.complete, request)

            ask("slot", 20)
            assert reached.wait(PATIENCE_S)
            for name, length in (("alone", 12), ("more", 1)):
                before_count = len(worker._requests._live)
                ask(name, length)
                while len(worker._requests._live) == before_count:
                    pass
            held.set()

            async def settle():
                return dict(
                    zip(calls, await asyncio.gather(*calls.values(), return_exceptions=True), strict=True)
                )

            results = running.call(settle())
    finally:
        held.set()
        worker.close()
    assert isinstance(
        results["more"], QueueFullError
    )  # the queue has more than its tokens in one prompt already
    assert results["more"].retry_after_s == 1.0
    assert "12 tokens" in str(results["more"])
    assert [len(results[name][0].token_ids) for name in ("slot", "alone")] == [1, 1]


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_deadline_frees_its_slot_within_two_steps(tmp_path, monkeypatch, phase, way):
    gate, left, told = threading.Semaphore(0), threading.Event(), threading.Event()
    steps, stalled = [], []

    def before(call):
        mine = call.tokens[0][:1] == (9,)
        if mine and left.is_set():
            steps.append(call)
        if mine and call.kind == phase and not stalled:
            stalled.append(call)
        if not left.is_set() and (stalled or phase == "queued"):
            assert gate.acquire(timeout=PATIENCE_S)

    worker = make_worker(tmp_path, make_session(slots=1, before_call=before))
    submit = worker.submit

    def submitted(request, sink):
        abort = submit(request, sink)
        return lambda: (abort(), told.set())

    monkeypatch.setattr(worker, "submit", submitted)
    try:
        with running_server(worker) as running, open_stub(running.address) as stub:
            other = None
            if phase == "queued":
                other = stub.Generate.future(wire("other", ids=(7,), tokens=2), timeout=PATIENCE_S)
                while not worker._requests._live:
                    pass
            call = stub.Generate.future(wire("late", ids=[9] * 9, tokens=30), timeout=0.5)
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert told.wait(PATIENCE_S)  # the client knows of it by its own clock, maybe before the worker
            left.set()
            gate.release(4)
            again = stub.Generate(wire("after", ids=(8, 8), tokens=3), timeout=PATIENCE_S)
            assert list(again.choices[0].token_ids) == continuation((8, 8), 3, VOCAB)
            if other is not None:
                assert len(other.result(PATIENCE_S).choices[0].token_ids) == 2
            assert seen(way, lambda: busy_with(stub), (0, 0)) == (0, 0)
    finally:
        left.set()
        gate.release(4)
        worker.close()
    assert len(steps) <= (0 if phase == "queued" else 2)


def test_tokens_per_second_are_measured(tmp_path, way):
    worker = make_worker(tmp_path)
    try:
        with running_server(worker) as running, WorkerClient(running.address) as client:
            client.complete(GenerationRequest("r", TokenPrompt((1,)), SamplingParams(max_tokens=3)))
            assert seen(way, lambda: client.load().generated_tokens, 3) == 3
            while client.load().tokens_per_second == 0:  # counted by whole seconds
                pass
            assert client.load().tokens_per_second <= 3 / 5
    finally:
        worker.close()
