"""Generation through a real channel: answers, refusals, and the ways a call can end early."""

from __future__ import annotations

import logging
import threading

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from llorch_serve.errors import CancelledError, QueueFullError, UnavailableError
from llorch_serve.rpc import worker_pb2 as pb
from support.fakes.generator import INFO, PATIENCE_S, FakeGenerator
from support.harness.rpc import open_stub, running_server

pytestmark = pytest.mark.usefixtures("way")

METHOD = "/llorch.v1.GenerationService/"


def request(*, max_tokens=3, **fields):
    fields.setdefault("input", pb.Input(text="Hello"))
    return pb.GenerateRequest(sampling=pb.Sampling(max_tokens=max_tokens, seed=5), **fields)


def stream(stub, *, timeout=PATIENCE_S, **fields):
    return stub.GenerateStream(pb.GenerateStreamRequest(request=request(**fields)), timeout=timeout)


def answered(stub, message, *, whole, timeout=PATIENCE_S):
    """Have the request answered by either method."""
    if whole:
        return [stub.Generate(message, timeout=timeout)]
    return list(stub.GenerateStream(pb.GenerateStreamRequest(request=message), timeout=timeout))


def violations(error):
    details = error_details_pb2.BadRequest()
    assert rpc_status.from_call(error).details[0].Unpack(details)
    return {v.field: v.description for v in details.field_violations}


@pytest.fixture
def generator():
    return FakeGenerator()


@pytest.fixture
def stepped():
    """Steps only when told to."""
    return FakeGenerator(free_running=False, slots=1)


@pytest.fixture
def server(generator):
    with running_server(generator) as running:
        yield running


@pytest.fixture
def stub(server):
    with open_stub(server.address) as stub:
        yield stub


@pytest.fixture
def stepped_stub(stepped):
    with running_server(stepped) as running, open_stub(running.address) as stub:
        yield stub


def test_a_stream_has_deltas_then_one_completion(stub):
    messages = list(stream(stub, request_id="mine"))
    assert "".join(m.text for m in messages) == "w0 w1 w2 "
    assert [i for m in messages for i in m.token_ids] == [0, 1, 2]
    assert [m.request_id for m in messages] == ["mine"] + [""] * (len(messages) - 1)
    assert [m.HasField("completion") for m in messages] == [False] * (len(messages) - 1) + [True]
    completion = messages[-1].completion
    assert completion.finish_reason == pb.FINISH_REASON_LENGTH
    assert not completion.HasField("stop_matched")
    assert (completion.usage.prompt_tokens, completion.usage.generated_tokens) == (5, 3)
    assert (completion.timings.queue_s, completion.timings.prefill_s, completion.timings.decode_s) == (
        0.25,
        0.5,
        1.75,
    )
    assert completion.seed == 5


def test_each_step_is_sent_when_it_happens(stepped, stepped_stub):
    responses = stream(stepped_stub)
    for word in ("w0 ", "w1 ", "w2 "):
        stepped.step()
        assert next(responses).text == word
    assert list(responses) == []


def test_a_whole_answer(stub):
    message = request(request_id="mine")
    message.sampling.stop.append("w2")
    message.sampling.max_tokens = 9
    response = stub.Generate(message, timeout=PATIENCE_S)
    [answer] = response.choices
    assert (response.request_id, answer.text, list(answer.token_ids)) == ("mine", "w0 w1 ", [0, 1])
    assert answer.completion.finish_reason == pb.FINISH_REASON_STOP
    assert answer.completion.stop_matched == "w2"


def test_an_answer_of_no_tokens(stub):
    message = request()
    message.sampling.stop.append("w0")
    assert stub.Generate(message, timeout=PATIENCE_S).choices[0].text == ""
    [only] = stub.GenerateStream(pb.GenerateStreamRequest(request=message), timeout=PATIENCE_S)
    assert only.request_id
    assert only.completion.usage.generated_tokens == 0


def test_streams_side_by_side_keep_apart(stub):
    streams = [stream(stub, max_tokens=n, request_id=f"r{n}") for n in range(1, 21)]
    for n, responses in enumerate(streams, start=1):
        assert "".join(m.text for m in responses) == "".join(f"w{i} " for i in range(n))


def test_a_reader_that_sleeps_gets_everything_in_fewer_messages():
    words, padding = 3000, 2000  # 6 MB, far beyond what the transport buffers
    generator = FakeGenerator(padding=padding)
    with running_server(generator) as running, open_stub(running.address) as stub:
        responses = stream(stub, max_tokens=words)
        generator.wait_for(lambda g: g.steps == words and not g.live_ids)
        messages = list(responses)
    assert [i for m in messages for i in m.token_ids] == [i % 256 for i in range(words)]
    assert "".join(m.text for m in messages) == "".join(f"w{i} " + "." * padding for i in range(words))
    assert len(messages) < words / 2


@pytest.mark.parametrize("whole", [True, False])
def test_every_bad_field_is_reported(stub, whole):
    message = request(max_tokens=-1)
    message.sampling.temperature = float("nan")
    message.sampling.stop.extend(["a", ""])
    with pytest.raises(grpc.RpcError) as caught:
        answered(stub, message, whole=whole)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert set(violations(caught.value)) == {
        "sampling.temperature",
        "sampling.max_tokens",
        "sampling.stop[1]",
    }


def test_a_request_without_input_or_without_content(stub, generator):
    for call, field in (
        (lambda: stub.Generate(pb.GenerateRequest(), timeout=PATIENCE_S), "input"),
        (lambda: list(stub.GenerateStream(pb.GenerateStreamRequest(), timeout=PATIENCE_S)), "request"),
        (lambda: stub.Tokenize(pb.TokenizeRequest(), timeout=PATIENCE_S), "input"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert list(violations(caught.value)) == [field]
    assert generator.submitted == []


@pytest.mark.parametrize(
    ("method", "wire"),
    [
        ("Generate", b"\x0a\x05\x0a\x03\xed\xa0\x80"),  # input.text is a lone surrogate
        ("GenerateStream", b"\x0a\x07\x0a\x05\x0a\x03\xed\xa0\x80"),
        ("Tokenize", b"\x0a\x05\x0a\x03\xed\xa0\x80"),
        ("Generate", b"\x0a\x05\x0a\x03a\xff\xff"),
        ("Detokenize", b"\xff\xff\xff"),
        ("Generate", b"\x0a\x7f"),
    ],
)
def test_bytes_that_are_no_message_are_the_callers_fault(server, method, wire):
    with grpc.insecure_channel(server.address) as channel:
        if method == "GenerateStream":
            failed = channel.unary_stream(METHOD + method)(wire, timeout=PATIENCE_S)
            with pytest.raises(grpc.RpcError) as caught:
                next(failed)
        else:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(METHOD + method)(wire, timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert list(violations(caught.value)) == ["request"]
    with open_stub(server.address) as stub:
        assert stub.Generate(request(), timeout=PATIENCE_S).choices[0].text == "w0 w1 w2 "


def test_the_model_must_be_the_one_served(stub):
    assert stub.Generate(request(model=INFO.model_id), timeout=PATIENCE_S).choices[0].text
    with pytest.raises(grpc.RpcError, match="'other' was asked for, this worker serves 'fake-1M'") as caught:
        stub.Generate(request(model="other"), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_a_live_id_is_refused_and_its_owner_goes_on(stepped, stepped_stub):
    first = stream(stepped_stub, request_id="twice", max_tokens=2)
    stepped.step()
    next(first)
    with pytest.raises(grpc.RpcError) as caught:
        next(stream(stepped_stub, request_id="twice"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert list(violations(caught.value)) == ["request_id"]
    stepped.step()
    assert [m.text for m in first] == ["w1 "]
    again = stream(stepped_stub, request_id="twice", max_tokens=1)
    stepped.step()
    assert [m.text for m in again] == ["w0 "]
    assert stepped.aborted == []


def test_a_full_queue_says_when_to_come_back(stub, generator):
    generator.fail_submit = QueueFullError("64 requests are live; try again", retry_after_s=1.5)
    with pytest.raises(grpc.RpcError, match="64 requests are live") as caught:
        stub.Generate(request(), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    assert rpc_status.from_call(caught.value).details[0].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnavailableError("engine has ended"), "UNAVAILABLE"),
        (CancelledError("aborted"), "CANCELLED"),
        (RuntimeError("secret"), "INTERNAL"),
    ],
)
def test_an_error_in_mid_answer_is_a_status(stepped, stepped_stub, caplog, error, code):
    responses = stream(stepped_stub)
    stepped.step()
    assert next(responses).text == "w0 "
    stepped.fail_step = error
    with caplog.at_level(logging.CRITICAL):
        stepped.step()
        with pytest.raises(grpc.RpcError) as caught:
            next(responses)
    assert caught.value.code().name == code
    assert "secret" not in caught.value.details()


def test_a_bug_in_submit_leaves_the_id_free(stub, generator, caplog):
    generator.fail_submit = KeyError("secret")
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.RpcError, match="internal error") as caught:
        stub.Generate(request(request_id="a"), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "KeyError: 'secret'" in caplog.text
    generator.fail_submit = None
    assert stub.Generate(request(request_id="a"), timeout=PATIENCE_S).choices[0].text


def test_an_abort_from_the_workers_side_ends_cancelled(stepped, stepped_stub):
    responses = stream(stepped_stub, request_id="a")
    stepped.step()
    next(responses)
    stepped.abort("a")
    with pytest.raises(grpc.RpcError, match="aborted after 1 tokens") as caught:
        next(responses)
    assert caught.value.code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("whole", [True, False])
def test_cancelling_a_running_call_frees_its_slot_without_another_step(stepped, stepped_stub, whole):
    if whole:
        call = stepped_stub.Generate.future(request(request_id="a"))
    else:
        call = stream(stepped_stub, request_id="a")
    stepped.step()
    stepped.wait_for(lambda g: g.steps == 1)
    call.cancel()
    stepped.wait_for(lambda g: g.aborted == ["a"] and not g.live_ids)
    assert stepped.steps == 1


def test_cancelling_a_queued_call_removes_it(stepped, stepped_stub):
    running = stream(stepped_stub, request_id="running", max_tokens=2)
    stepped.wait_for(lambda g: g.live_ids == ["running"])
    queued = stream(stepped_stub, request_id="queued")
    stepped.wait_for(lambda g: g.live_ids == ["running", "queued"])
    queued.cancel()
    stepped.wait_for(lambda g: g.aborted == ["queued"] and g.live_ids == ["running"])
    stepped.step(2)
    assert "".join(m.text for m in running) == "w0 w1 "


def test_cancelling_while_the_prompt_is_tokenised_aborts_it_afterwards(generator, stub):
    generator.submit_gate = threading.Event()
    call = stream(stub, request_id="a", max_tokens=None)
    generator.wait_for(lambda g: g.submitted)
    call.cancel()
    for _ in range(3):  # answered after the cancellation, which went ahead on the same connection
        stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=PATIENCE_S)
    assert generator.aborted == []
    generator.submit_gate.set()
    generator.wait_for(lambda g: g.aborted == ["a"] and not g.live_ids)


def test_a_long_tokenisation_holds_up_nobody(stepped, stepped_stub):
    running = stream(stepped_stub)
    stepped.step()
    next(running)
    stepped.submit_gate = threading.Event()
    long = stream(stepped_stub, request_id="long")
    stepped.wait_for(lambda g: len(g.submitted) == 2)
    stepped.step(2)
    assert "".join(m.text for m in running) == "w1 w2 "
    stepped.submit_gate.set()
    stepped.run_freely()
    assert list(long)


@pytest.mark.parametrize("whole", [True, False])
def test_a_deadline_ends_the_request(stepped, stepped_stub, whole):
    with pytest.raises(grpc.RpcError) as caught:
        answered(stepped_stub, request(request_id="a"), whole=whole, timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    # A server too busy to admit the request before the deadline never submits it, and has nothing to abort.
    stepped.wait_for(lambda g: not g.live_ids and g.aborted == [r.request_id for r in g.submitted])


def test_a_client_that_closes_its_channel_frees_its_slots(stepped):
    with running_server(stepped) as running:
        with open_stub(running.address) as stub:
            # Long ones: each abort makes a step, in which those not yet aborted go on.
            streams = [stream(stub, request_id=f"r{i}", max_tokens=10**9) for i in range(5)]
            stepped.wait_for(lambda g: len(g.live_ids) == 5)
        stepped.wait_for(lambda g: sorted(g.aborted) == [f"r{i}" for i in range(5)] and not g.live_ids)
        assert all(s.code() is grpc.StatusCode.CANCELLED for s in streams)


def test_a_client_that_goes_away_in_mid_stream_leaves_no_noise(caplog):
    generator = FakeGenerator(padding=1000)
    with caplog.at_level(logging.INFO), running_server(generator) as running:
        for _ in range(20):
            # While a client waits for its turn, its next message grows.
            with open_stub(running.address, max_receive_message_length=-1) as stub:
                # An answer that no time lets end by itself, however busy the machine: each has to be aborted.
                next(stream(stub, max_tokens=10**9))
        generator.wait_for(lambda g: len(g.aborted) == 20 and not g.live_ids)
        with open_stub(running.address) as stub:
            assert (
                stub.Generate(request(), timeout=PATIENCE_S).choices[0].completion.usage.generated_tokens == 3
            )
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO and r.name != "asyncio"] == []


def test_many_errors_at_once(stub):
    bad = [stub.Generate.future(request(max_tokens=-1), timeout=PATIENCE_S) for _ in range(300)]
    good = [stub.Generate.future(request(), timeout=PATIENCE_S) for _ in range(20)]
    assert {f.exception().code() for f in bad} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert {f.result().choices[0].text for f in good} == {"w0 w1 w2 "}


def test_a_message_beyond_the_limit_gets_a_status_with_both_sizes(server):
    with open_stub(server.address, max_receive_message_length=2**24) as stub:
        fits = stub.Tokenize(pb.TokenizeRequest(input=pb.Input(text="a" * 4_000_000)), timeout=PATIENCE_S)
        assert len(fits.token_ids) == 4_000_000
        too_large = pb.TokenizeRequest(input=pb.Input(text="a" * 17_000_000))
        with pytest.raises(grpc.RpcError, match=r"larger than max \(170000\d\d vs. 16777216\)") as caught:
            stub.Tokenize(too_large, timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.Generate(request(), timeout=PATIENCE_S).choices[0].text


def test_a_smaller_limit_can_be_set(generator):
    with (
        running_server(generator, max_message_bytes=4 * 2**20) as running,
        open_stub(running.address) as stub,
    ):
        with pytest.raises(grpc.RpcError, match=r"\(50000\d\d vs. 4194304\)"):
            stub.Tokenize(pb.TokenizeRequest(input=pb.Input(text="a" * 5_000_000)), timeout=PATIENCE_S)
        assert stub.Generate(request(), timeout=PATIENCE_S).choices[0].text


def test_tokenize_and_detokenize(stub):
    response = stub.Tokenize(pb.TokenizeRequest(input=pb.Input(text="Hé")), timeout=PATIENCE_S)
    assert (list(response.token_ids), response.text) == ([72, 195, 169], "Hé")
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="Hi")])
    assert stub.Tokenize(pb.TokenizeRequest(input=pb.Input(chat=chat)), timeout=PATIENCE_S).text == "<user>Hi"
    for keep, text in ((None, "Hi"), (False, "Hi"), (True, "Hi\x02")):
        message = pb.DetokenizeRequest(token_ids=[72, 105, 2], keep_special_tokens=keep)
        assert stub.Detokenize(message, timeout=PATIENCE_S).text == text
    with pytest.raises(grpc.RpcError, match="token_ids: found 300"):
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[300]), timeout=PATIENCE_S)


def test_model_info(stub):
    info = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=PATIENCE_S)
    assert (info.model_id, info.provider_node_share, list(info.stop_token_ids)) == ("fake-1M", 0.75, [2, 7])
