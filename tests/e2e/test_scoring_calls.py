"""Several answers and scores through a real channel: the plain stub, and the typed client."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.config import EngineConfig
from llorch_serve.errors import InvalidRequestError, ModelMismatchError, UnsupportedError
from llorch_serve.observe.logs import FIELDS
from llorch_serve.observe.narration import Narrator
from llorch_serve.observe.tap import ObservedGenerator
from llorch_serve.requests import AnswerOptions, GenerationRequest, ScoreRequest, TextPrompt, TokenPrompt
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.worker.worker import Worker
from support.fakes.session import Call, continuation, next_logits
from support.harness.rpc import open_stub, running_server
from support.harness.worker import (
    CONTEXT,
    PATIENCE_S,
    TOKENIZER,
    VOCAB,
    make_session,
    make_worker,
    split_options,
)

PROMPT = tuple(range(5, 20))
BOS = 3


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    config = EngineConfig(prefill_chunk=8)
    made = make_worker(tmp_path, make_session(slots=3), config=config, bos_token_id=BOS)
    yield made
    made.close()


@pytest.fixture
def address(worker: Worker) -> Iterator[str]:
    with running_server(worker) as running:
        yield running.address


@pytest.fixture
def client(address: str) -> Iterator[WorkerClient]:
    with WorkerClient(address) as made:
        yield made


def asked(**sampling: object) -> GenerationRequest:
    answers, params = split_options({"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **sampling})
    return GenerationRequest("r", TokenPrompt(PROMPT), params, answers=answers)


def log_likelihood(tokens: tuple[int, ...], first: int) -> float:
    """From the definition, without a cache."""
    found = 0.0
    for place in range(first, len(tokens)):
        logits = next_logits(tokens[:place], VOCAB).astype(np.float64)
        found += logits[tokens[place]] - np.log(np.exp(logits).sum())
    return found


def test_a_stream_of_several_answers_tells_them_apart(client: WorkerClient) -> None:
    updates = list(client.generate(asked(n=5, temperature=1.0, seed=3)))
    assert [update.is_last for update in updates] == [False] * (len(updates) - 1) + [True]
    assert sorted(u.index for u in updates if u.completion is not None) == list(range(5))
    whole = client.complete(asked(n=5, temperature=1.0, seed=3))
    assert [answer.index for answer in whole] == list(range(5))
    for answer in whole:
        streamed = [u for u in updates if u.index == answer.index]
        assert tuple(t for u in streamed for t in u.token_ids) == answer.token_ids
        assert "".join(u.text for u in streamed) == answer.text
        assert streamed[-1].completion is not None
        assert answer.completion is not None
        assert streamed[-1].completion.seed == answer.completion.seed


def test_best_of_comes_whole_and_not_as_a_stream(client: WorkerClient) -> None:
    [best] = client.complete(asked(best_of=4, temperature=1.0, seed=3))
    several = client.complete(asked(n=4, temperature=1.0, seed=3))
    likeliest = max(several, key=lambda a: log_likelihood(PROMPT + a.token_ids, len(PROMPT)))
    assert best.token_ids == likeliest.token_ids
    with pytest.raises(InvalidRequestError, match=r"sampling\.best_of: found with GenerateStream"):
        list(client.generate(asked(best_of=4)))


def test_prompt_logprobs_and_echo_arrive_once(client: WorkerClient) -> None:
    text = "hello there, who is it"
    ids = TOKENIZER.encode(text, add_special_tokens=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=3)
    options = AnswerOptions(n=2, echo=True, prompt_logprobs=2)
    request = GenerationRequest("r", TextPrompt(text), sampling, answers=options)
    streamed, whole = list(client.generate(request)), client.complete(request)
    for answers in (streamed, whole):
        told = [u for u in answers if u.prompt_logprobs]
        assert [u.index for u in told] == [0]
        assert sum(p.chosen.logprob for p in told[0].prompt_logprobs) == pytest.approx(log_likelihood(ids, 1))
        assert [p.chosen.token_id for p in told[0].prompt_logprobs] == list(ids[1:])
    assert all(answer.text.startswith(text) for answer in whole)


def test_scores_through_the_client(client: WorkerClient) -> None:
    greedy = tuple(continuation(PROMPT, 4, VOCAB))
    continuations = (greedy, (7, 8), (9,))
    wanted = tuple(map(TokenPrompt, continuations))
    found = client.score(ScoreRequest("s", TokenPrompt(PROMPT), wanted, logprobs=1))
    for result, tokens in zip(found, continuations, strict=True):
        assert result.logprob == pytest.approx(log_likelihood(PROMPT + tokens, len(PROMPT)))
        assert result.is_greedy == (tokens == greedy)
        assert [p.chosen.token_id for p in result.logprobs] == list(tokens)
        assert (result.token_count, result.context_tokens) == (len(tokens), len(PROMPT))


def test_a_call_is_narrated_with_its_figures(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    observed = ObservedGenerator(worker, [Narrator("w")])
    continuations = (TokenPrompt((7, 8)), TokenPrompt((9,)))
    with (
        caplog.at_level(logging.INFO, "llorch.narration"),
        running_server(observed) as running,
        WorkerClient(running.address) as client,
    ):
        client.score(ScoreRequest("s", TokenPrompt(PROMPT), continuations, correlation_id="c-1"))
        observed.settle()
    [fields] = [getattr(record, FIELDS) for record in caplog.records if hasattr(record, FIELDS)]
    observed.close()
    expected = {
        "action": "inference.complete",
        "job_id": "s",
        "correlation_id": "c-1",
        "finish_reason": "score",
        "continuations": 2,
        "tokens_in": len(PROMPT) + 3,
        "tokens_out": 0,
    }
    assert {name: fields[name] for name in expected} == expected
    assert fields["duration_ms"] > 0


def test_grpcurl_is_enough(address: str) -> None:
    with open_stub(address) as stub:
        response = stub.Score(
            pb.ScoreRequest(
                context=pb.Input(text="hello "),
                continuations=[pb.Continuation(text="there"), pb.Continuation(text="world")],
            ),
            timeout=PATIENCE_S,
        )
        assert len(response.scores) == 2
        assert response.request_id
        assert [list(score.logprobs) for score in response.scores] == [[], []]
        whole = TOKENIZER.encode("hello there", add_special_tokens=True)
        before = TOKENIZER.encode("hello", add_special_tokens=True)
        assert response.scores[0].logprob == pytest.approx(log_likelihood(whole, len(before)))


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (pb.ScoreRequest(), ["context"]),
        (pb.ScoreRequest(context=pb.Input(text="a")), ["continuations"]),
        (
            pb.ScoreRequest(
                context=pb.Input(),
                continuations=[pb.Continuation(text="a"), pb.Continuation()],
                request_id="x" * 129,
            ),
            ["context", "request_id", "continuations[1]"],
        ),
        (
            pb.ScoreRequest(context=pb.Input(text="a"), continuations=[pb.Continuation(text="b")] * 257),
            ["continuations"],
        ),
        (
            pb.ScoreRequest(
                context=pb.Input(text="a"), continuations=[pb.Continuation(text="b")], logprobs=21
            ),
            ["logprobs"],
        ),
        (
            pb.ScoreRequest(
                context=pb.Input(tokens=pb.TokenInput(ids=[1] * CONTEXT)),
                continuations=[pb.Continuation(tokens=pb.TokenInput(ids=[1, 2]))],
            ),
            ["continuations[0]"],
        ),
    ],
)
def test_bad_fields_are_invalid_arguments(address: str, message: pb.ScoreRequest, fields: list[str]) -> None:
    with open_stub(address) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.Score(message, timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for field in fields:
        assert f"{field}: " in caught.value.details()
    if fields == ["continuations[0]"]:
        assert f"{CONTEXT + 2} together; the context holds {CONTEXT}" in caught.value.details()


def test_another_model_is_not_scored(address: str, client: WorkerClient) -> None:
    message = pb.ScoreRequest(
        context=pb.Input(text="a"), continuations=[pb.Continuation(text="b")], model="other"
    )
    with open_stub(address) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.Score(message, timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert ModelMismatchError.exit_code == 2


def test_what_a_graph_cannot_do_is_unimplemented(tmp_path: Path) -> None:
    from dataclasses import replace

    session = make_session()
    session.capabilities = replace(session.capabilities, prompt_logits=False)
    worker = make_worker(tmp_path, session)
    with running_server(worker) as running:
        with open_stub(running.address) as stub, pytest.raises(grpc.RpcError) as caught:
            stub.Score(
                pb.ScoreRequest(context=pb.Input(text="a"), continuations=[pb.Continuation(text="b")]),
                timeout=PATIENCE_S,
            )
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with WorkerClient(running.address) as client, pytest.raises(UnsupportedError, match="last token"):
            client.score(ScoreRequest("s", TextPrompt("a"), (TextPrompt("b"),)))
    worker.close()


@pytest.mark.parametrize("kind", ["score", "answers"])
def test_a_caller_that_leaves_ends_everything_of_its_request(tmp_path: Path, kind: str) -> None:
    started, go = threading.Event(), threading.Event()

    def before(_call: Call) -> None:
        started.set()
        assert go.wait(PATIENCE_S)

    worker = make_worker(tmp_path, make_session(slots=2, before_call=before))
    with running_server(worker) as running, open_stub(running.address) as stub:
        if kind == "score":
            call = stub.Score.future(
                pb.ScoreRequest(
                    context=pb.Input(text="a"), continuations=[pb.Continuation(text="b c d e")] * 20
                )
            )
        else:
            sampling = pb.Sampling(n=6, ignore_eos=True)
            call = stub.Generate.future(pb.GenerateRequest(input=pb.Input(text="a"), sampling=sampling))
        assert started.wait(PATIENCE_S)
        call.cancel()
        go.set()
        # The next request is served; and by then nothing of the first one is left.
        answer = stub.Generate(
            pb.GenerateRequest(
                input=pb.Input(text="z"), sampling=pb.Sampling(max_tokens=40, ignore_eos=True)
            ),
            timeout=PATIENCE_S,
        )
        assert answer.choices[0].completion.usage.generated_tokens == 40
        load = worker.load()
    worker.close()
    assert (load.running, load.waiting) == (0, 0)
