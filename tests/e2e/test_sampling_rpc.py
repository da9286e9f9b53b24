"""Sampling over a real channel: a real worker behind it refuses by field name and streams
log-probabilities.
"""

from __future__ import annotations

import math

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.errors import InvalidRequestError
from llorch_serve.rpc import worker_pb2 as pb
from support.harness.rpc import open_stub, running_server
from support.harness.worker import PATIENCE_S, VOCAB, ask, make_worker, request

PROMPT = (40, 41, 42)
NUMBERS = (math.nan, math.inf, -math.inf)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    made = make_worker(tmp_path_factory.mktemp("artifact"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def address(worker):
    with running_server(worker) as running:
        yield running.address


@pytest.fixture
def stub(address):
    with open_stub(address) as stub:
        yield stub


def message(**sampling):
    prompt = pb.Input(tokens=pb.TokenInput(ids=PROMPT))
    return pb.GenerateRequest(input=prompt, sampling=pb.Sampling(**{"max_tokens": 4, **sampling}))


def whole(stub, **sampling):
    """Return the one answer of a unary call."""
    (choice,) = stub.Generate(message(**sampling), timeout=PATIENCE_S).choices
    return choice


def refused_fields(stub, **sampling):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(message(**sampling), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = error_details_pb2.BadRequest()
    assert rpc_status.from_call(caught.value).details[0].Unpack(details)
    return [v.field for v in details.field_violations]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", (-0.1, 2.1, *NUMBERS)),
        ("top_k", (-1,)),
        ("top_p", (0.0, 1.1, *NUMBERS)),
        ("min_p", (-0.1, 1.1, *NUMBERS)),
        ("typical_p", (0.0, 1.1, *NUMBERS)),
        ("repetition_penalty", (0.0, 2.1, *NUMBERS)),
        ("presence_penalty", (-2.1, 2.1, *NUMBERS)),
        ("frequency_penalty", (-2.1, 2.1, *NUMBERS)),
        ("repeat_last_n", (-2,)),
        ("logit_bias", (dict.fromkeys(range(1025), 0.0),)),
        ("seed", (-1,)),
        ("max_tokens", (-1,)),
        ("min_tokens", (-1, 5)),
        ("logprobs", (-1, 21)),
        ("stop", (["x"] * 17,)),
    ],
)
def test_what_is_out_of_range_is_an_invalid_argument_with_its_name(stub, field, values):
    for value in values:
        assert refused_fields(stub, **{field: value}) == [f"sampling.{field}"], value


def test_elements_are_named_by_place_or_key(stub):
    fields = refused_fields(
        stub, stop=["a", ""], stop_token_ids=[VOCAB], logit_bias={99999: 1.0, 4: math.nan}
    )
    assert set(fields) == {
        "sampling.stop[1]",
        "sampling.stop_token_ids[0]",
        "sampling.logit_bias[99999]",
        "sampling.logit_bias[4]",
    }


def test_all_bad_fields_come_at_once(stub):
    bad = {"temperature": 3.0, "typical_p": 0.0, "presence_penalty": 9.0, "repeat_last_n": -5, "logprobs": 99}
    assert set(refused_fields(stub, **bad)) == {f"sampling.{name}" for name in bad}


def test_nothing_to_continue_is_refused_and_nothing_to_generate_is_an_answer(stub):
    for prompt in (pb.Input(tokens=pb.TokenInput(ids=[])), pb.Input()):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(pb.GenerateRequest(input=prompt), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "input" in caught.value.details()
    empty = whole(stub, max_tokens=0)
    assert (empty.text, list(empty.token_ids)) == ("", [])
    assert empty.completion.finish_reason == pb.FINISH_REASON_LENGTH
    assert len(whole(stub, ignore_eos=True).token_ids) == 4


def test_a_bias_outside_the_vocabulary_does_not_touch_a_running_stream(worker, stub, address):
    alone = ask(worker, PROMPT, max_tokens=30, ignore_eos=True).ids
    with WorkerClient(address) as client:
        stream = client.generate(request("long", PROMPT, max_tokens=30, ignore_eos=True))
        ids = list(next(stream).token_ids)
        assert refused_fields(stub, logit_bias={99999: 1.0}) == ["sampling.logit_bias[99999]"]
        with pytest.raises(InvalidRequestError, match="logit_bias"):  # an id that no message can carry
            next(client.generate(request("bad", PROMPT, logit_bias={-1: 1.0})))
        ids += [token for update in stream for token in update.token_ids]
    assert ids == alone


ASKED = {"temperature": 0.9, "seed": 3, "max_tokens": 8, "ignore_eos": True, "logprobs": 2}


def test_a_client_gets_what_the_worker_gives(worker, address):
    asked = {**ASKED, "typical_p": 0.95, "frequency_penalty": 0.5, "repeat_last_n": 5, "logit_bias": {9: 2.0}}
    here = ask(worker, PROMPT, **asked)
    with WorkerClient(address) as client:
        there = list(client.generate(request("r", PROMPT, **asked)))
    places = [place for update in there for place in update.logprobs]
    assert [token for update in there for token in update.token_ids] == here.ids
    assert places == [place for update in here.updates for place in update.logprobs]
    assert all(len(update.logprobs) == len(update.token_ids) for update in there)
    assert all(len(place.top) == 2 for place in places)


def test_a_whole_answer_carries_them_too(worker, stub):
    here = ask(worker, PROMPT, **ASKED)
    answer = whole(stub, **ASKED)
    assert list(answer.token_ids) == here.ids == [place.chosen.token_id for place in answer.logprobs]
    assert all(math.isfinite(place.chosen.logprob) for place in answer.logprobs)
    without = whole(stub, **{k: v for k, v in ASKED.items() if k != "logprobs"})
    assert list(without.token_ids) == here.ids
    assert not without.logprobs


def test_special_tokens_are_shown_when_asked_for(stub):
    wish = {"logit_bias": {3: 100.0}, "ignore_eos": True, "temperature": 0.0}
    assert whole(stub, **wish).text == ""
    shown = whole(stub, **wish, keep_special_tokens=True).text
    assert shown == "<|turn_end|>" * 4
