"""What gRPC has beside generation, over HTTP: tokens of texts, texts of tokens, and scores."""

from __future__ import annotations

import pytest

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.errors import InvalidRequestError
from llorch_serve.http.settings import HttpSettings
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.requests import ChatMessage, ChatPrompt, ScoreRequest, TextPrompt, TokenPrompt
from support.builders.checkpoints import BOS_ID
from support.fakes.generator import INFO
from support.harness.http import fake_front, running_front, send
from support.harness.worker import make_worker

pytestmark = pytest.mark.usefixtures("way")

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def served():
    with fake_front() as (front, generator):
        yield front, generator


def ask(front, path, **body):
    answer = send(front.port, "POST", path, body)
    assert answer.status == 200, answer.body
    return answer.document


def refusal(front, path, body):
    answer = send(front.port, "POST", path, body)
    assert answer.status == 400, answer.body
    return [item["field"] for item in answer.document["error"]["errors"]]


def test_a_text_becomes_tokens_and_tokens_a_text(served):
    front, _ = served
    assert ask(front, "/tokenize", model=INFO.model_id, prompt="Hi") == {
        "count": 2,
        "max_model_len": INFO.context_length,
        "tokens": [72, 105],
        "token_strs": None,
    }
    assert ask(front, "/tokenize", prompt="Hi", return_token_strs=True)["token_strs"] == ["H", "i"]
    assert ask(front, "/detokenize", tokens=[72, 105]) == {"prompt": "Hi"}
    assert ask(front, "/detokenize", tokens=[]) == {"prompt": ""}
    assert ask(front, "/detokenize", tokens=[72, 7]) == {"prompt": "H\x07"}
    assert ask(front, "/detokenize", tokens=[72, 7], keep_special_tokens=False) == {"prompt": "H"}


def test_a_conversation_becomes_tokens(served):
    assert ask(served[0], "/tokenize", messages=MESSAGES, add_generation_prompt=True)["count"] == len(
        "<user>Hi"
    )


def test_special_tokens_can_be_left_out(served, monkeypatch):
    front, generator = served
    seen = []
    monkeypatch.setattr(generator, "tokenize", lambda prompt: (seen.append(prompt), ((), ""))[1])
    ask(front, "/tokenize", prompt="Hi", add_special_tokens=False)
    ask(front, "/tokenize", prompt="Hi")
    ask(front, "/tokenize", messages=MESSAGES, add_special_tokens=False)
    assert seen[:2] == [TextPrompt("Hi", add_special_tokens=False), TextPrompt("Hi")]


def test_continuations_are_scored(served):
    front, generator = served
    answer = ask(
        front, "/v1/score", model=INFO.model_id, context="ab", continuations=["c", [1, 2]], logprobs=0
    )
    assert answer["object"] == "list"
    assert [(one["index"], one["logprob"], one["token_count"]) for one in answer["data"]] == [
        (0, -1.0, 1),
        (1, -2.0, 2),
    ]
    assert answer["data"][0]["logprobs"] == []
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
    (request,) = generator.scored
    assert (request.context, request.continuations) == (
        TextPrompt("ab"),
        (TextPrompt("c"), TokenPrompt((1, 2))),
    )
    assert request.logprobs == 0
    assert request.request_id == answer["id"]
    assert ask(front, "/v1/score", messages=MESSAGES, continuations=["c"])["data"][0]["logprobs"] is None
    assert generator.scored[1].context == ChatPrompt((ChatMessage("user", "Hi"),))


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/tokenize", {}, ["prompt"]),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, ["prompt"]),
        ("/tokenize", {"prompt": 1, "colour": "red"}, ["colour", "prompt"]),
        ("/tokenize", {"messages": []}, ["messages"]),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, ["add_special_tokens"]),
        ("/detokenize", {}, ["tokens"]),
        ("/detokenize", {"tokens": [256]}, ["tokens"]),
        ("/detokenize", {"tokens": [-1]}, ["tokens"]),
        ("/detokenize", {"tokens": ["a"]}, ["tokens[0]"]),
        ("/v1/score", {"continuations": ["a"]}, ["context"]),
        ("/v1/score", {"context": "a", "messages": MESSAGES, "continuations": ["a"]}, ["context"]),
        ("/v1/score", {"context": "a", "continuations": ["a"] * 257}, ["continuations"]),
        ("/v1/score", {"context": [-1], "continuations": [[-2]]}, ["continuations[0]", "context"]),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, ["text_1", "text_2", "continuations"]),
    ],
)
def test_bad_bodies_are_refused_by_the_fields_name(served, path, body, fields):
    assert refusal(served[0], path, body) == fields


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/score", "/v1/inference", "/cancel"])
def test_no_flag_is_named_that_would_change_nothing(path):
    with fake_front(settings=HttpSettings(unknown=UnknownFields.IGNORE)) as (front, _):
        answer = send(front.port, "POST", path, {"colour": "red"})
    assert answer.status == 400
    assert b"unknown field" in answer.body
    assert b"--unknown-fields" not in answer.body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/score", {"context": "a", "continuations": ["b"]}),
    ],
)
def test_another_model_is_not_found(served, path, body):
    answer = send(served[0].port, "POST", path, body | {"model": "other"})
    assert (answer.status, answer.document["error"]["code"]) == (404, "model_not_found")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A worker with a real tokenizer, over both protocols."""
    worker = make_worker(tmp_path_factory.mktemp("artifact"))
    with running_front(worker) as front, WorkerClient(front.rpc) as client:
        yield front, client
    worker.close()


def test_both_protocols_say_the_same(real):
    front, client = real
    ids, _ = client.tokenize(TextPrompt("Once upon"))
    assert tuple(ask(front, "/tokenize", prompt="Once upon")["tokens"]) == ids
    chat = ChatPrompt((ChatMessage("user", "Hi"),))
    assert tuple(ask(front, "/tokenize", messages=MESSAGES)["tokens"]) == client.tokenize(chat)[0]
    assert ask(front, "/detokenize", tokens=ids)["prompt"] == client.detokenize(ids, keep_special_tokens=True)
    request = ScoreRequest("r", TextPrompt("Once"), (TextPrompt(" upon"), TextPrompt(" a time")), logprobs=2)
    scores = client.score(request)
    told = ask(front, "/v1/score", context="Once", continuations=[" upon", " a time"], logprobs=2)["data"]
    for score, one in zip(scores, told, strict=True):
        assert (one["logprob"], one["is_greedy"]) == (score.logprob, score.is_greedy)
        assert [place["logprob"] for place in one["logprobs"]] == [p.chosen.logprob for p in score.logprobs]
        assert [len(place["top_logprobs"]) for place in one["logprobs"]] == [2] * score.token_count


def test_a_text_is_tokenised_without_what_the_tokenizer_adds(real):
    front, client = real
    whole = ask(front, "/tokenize", prompt="Once", return_token_strs=True)
    plain = ask(front, "/tokenize", prompt="Once", add_special_tokens=False, return_token_strs=True)
    assert whole["tokens"] == [BOS_ID, *plain["tokens"]]
    assert "".join(plain["token_strs"]) == "Once"
    with pytest.raises(InvalidRequestError, match="cannot be asked for over gRPC"):
        client.tokenize(TextPrompt("Once", add_special_tokens=False))
