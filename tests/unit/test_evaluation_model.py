"""A model is asked everything at once, in this process and behind gRPC; answers are the definition's."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.config import EngineConfig
from llorch_serve.errors import (
    InvalidRequestError,
    ModelMismatchError,
    NonFiniteLogitsError,
    QueueFullError,
)
from llorch_serve.evaluation.asking import AskedModel, LocalModel
from llorch_serve.evaluation.perplexity import NamedText, measure_texts
from llorch_serve.evaluation.remote import PATIENCE_S as LONGEST_WAIT_S
from llorch_serve.evaluation.remote import RemoteModel
from llorch_serve.evaluation.scores import ModelScores, cut_at, grouped
from llorch_serve.evaluation.windows import windows
from llorch_serve.requests import Abort, GenerationRequest, ScoreRequest, TokenPrompt, UpdateSink
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.worker.worker import Worker
from support.fakes.session import Call, Logits, continuation, next_logits
from support.harness.rpc import running_server
from support.harness.worker import CONTEXT, PATIENCE_S, TOKENIZER, VOCAB, make_session, make_worker

BOS = 3
TEXT = "hello there, who is it that comes so late through night and wind " * 4
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=4)


@contextlib.contextmanager
def no_progress(_phase: str, _total: int) -> Iterator[Callable[[], None]]:
    yield lambda: None


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    config = EngineConfig(prefill_chunk=8)
    made = make_worker(tmp_path, make_session(slots=3), config=config, bos_token_id=BOS)
    yield made
    made.close()


@pytest.fixture(params=["here", "grpc"])
def asked(request: pytest.FixtureRequest, worker: Worker) -> Iterator[AskedModel]:
    if request.param == "here":
        yield LocalModel(worker)
        return
    with running_server(worker) as running, WorkerClient(running.address) as client:
        yield RemoteModel(client)


@pytest.fixture
def scores(asked: AskedModel) -> ModelScores:
    return ModelScores(asked, no_progress)


def log_likelihood(tokens: Sequence[int], first: int) -> float:
    """From the definition, without a cache."""
    return sum(logprobs(tokens, first))


def logprobs(tokens: Sequence[int], first: int) -> list[float]:
    found = []
    for place in range(first, len(tokens)):
        logits = next_logits(tokens[:place], VOCAB).astype(np.float64)
        found.append(float(logits[tokens[place]] - np.log(np.exp(logits).sum())))
    return found


def encoded(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text, add_special_tokens=True)


def test_pairs_are_scored_in_their_order(scores: ModelScores) -> None:
    pairs = [("hello", " there"), ("hello", " world"), ("", "who"), ("is it ", "you"), ("hello", " there")]
    for (context, text), (logprob, is_greedy) in zip(pairs, scores.log_likelihoods(pairs), strict=True):
        before = encoded(context.rstrip())
        after = encoded(context + text)[len(before) :]
        prefix = before or (BOS,)
        assert logprob == pytest.approx(log_likelihood((*prefix, *after), len(prefix)))
        assert is_greedy == (continuation(prefix, len(after), VOCAB) == list(after))
    assert scores.cut.scored == 0


def test_a_context_that_is_too_long_loses_its_beginning(scores: ModelScores) -> None:
    pairs = [("hello", " there"), (TEXT, " world"), (TEXT, " it"), ("who", " is")]
    found = scores.log_likelihoods(pairs)
    for (context, text), (logprob, _) in zip(pairs, found, strict=True):
        before = encoded(context.rstrip())
        after = encoded(context + text)[len(before) :]
        kept = (*before, *after)[-(CONTEXT + 1) :]
        assert logprob == pytest.approx(log_likelihood(kept, len(kept) - len(after)))
    assert scores.cut.scored == 2


def test_what_is_wrong_with_a_pair_for_another_reason_is_told(scores: ModelScores) -> None:
    with pytest.raises(InvalidRequestError, match="found no tokens"):
        scores.log_likelihoods([("hello", " there"), ("hello", "")])


@pytest.mark.parametrize(("window", "stride"), [(CONTEXT, CONTEXT), (20, 7), (16, 1)])
def test_each_token_of_a_text_is_predicted_from_its_window(
    scores: ModelScores, window: int, stride: int
) -> None:
    [found] = measure_texts(scores, [NamedText("t", TEXT)], window=window, stride=stride)
    ids = TOKENIZER.encode(TEXT, add_special_tokens=False)
    expected = []
    for part in windows(ids, window, stride):
        context = part.context or (BOS,)
        expected += logprobs((*context, *part.tokens), len(context))
    assert found.tokens == len(ids) == len(expected)
    assert found.log_likelihood == pytest.approx(sum(expected))
    assert found.blocks == pytest.approx([sum(expected[i : i + 64]) for i in range(0, len(ids), 64)])
    assert scores.token_logprobs(ids, window, stride) == pytest.approx(expected)


def test_whole_texts_are_predicted_with_what_the_tokenizer_puts_before_them(scores: ModelScores) -> None:
    texts = [TEXT, "hello", ""]
    for text, found in zip(texts, scores.whole_texts(texts), strict=True):
        expected = 0.0
        for part in windows(encoded(text), CONTEXT, CONTEXT):
            context = part.context or (BOS,)
            expected += log_likelihood((*context, *part.tokens), len(context))
        assert found == pytest.approx(expected)


def test_texts_are_continued_up_to_a_stop_string(scores: ModelScores) -> None:
    stops = scores.info.stop_token_ids
    texts = ["hello", "there", TEXT]
    whole = scores.continue_texts([(text, GREEDY) for text in texts])
    for text, answer in zip(texts, whole, strict=True):
        ids = encoded(text)[-(CONTEXT - 4) :]
        assert answer == TOKENIZER.decode(
            continuation(ids, 4, VOCAB, stop_ids=stops), keep_special_tokens=False
        )
    assert scores.cut.generated == 1
    many = tuple(f"never {n}" for n in range(20))  # more than one request may have
    last = whole[0][-1:]
    assert last
    [cut] = scores.continue_texts(
        [("hello", SamplingParams(temperature=0, max_tokens=4, stop=(*many, last)))]
    )
    assert cut == whole[0][: whole[0].index(last)]


def test_draws_have_seeds_of_their_place_and_text(scores: ModelScores) -> None:
    drawn = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0, max_tokens=8)
    asked = [("hello", drawn)] * 3 + [("there", drawn)]
    first = scores.continue_texts(asked)
    assert scores.continue_texts(asked) == first
    assert len(set(first)) == 4


def test_stop_strings_cut_at_the_first_of_them() -> None:
    assert cut_at("abcdef", ("e", "bc")) == "a"
    assert cut_at("abc", ("x",)) == "abc"


def test_neighbours_of_one_context_go_in_one_call() -> None:
    pairs = [("a", "1"), ("a", "2"), ("b", "1"), ("a", "3")]
    assert list(grouped(pairs)) == [("a", ["1", "2"]), ("b", ["1"]), ("a", ["3"])]
    assert [len(texts) for _, texts in grouped([("a", "x")] * 300)] == [256, 44]


class Slow:
    """A generator that takes its time to pass requests on, each time another one."""

    def __init__(self, worker: Worker, pauses: Iterator[float]) -> None:
        self._worker = worker
        self._pauses = pauses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def submit(self, request: GenerationRequest, sink: UpdateSink) -> Abort:
        time.sleep(next(self._pauses))
        return self._worker.submit(request, sink)


def calls_of(folder: Path, pauses: Iterator[float]) -> list[str]:
    """Return what the session was called with while six texts were continued and six scored."""
    calls: list[Call] = []
    session = make_session(slots=3, before_call=calls.append)
    worker = make_worker(folder, session, config=EngineConfig(prefill_chunk=8), bos_token_id=BOS)
    scores = ModelScores(LocalModel(Slow(worker, pauses)), no_progress)  # type: ignore[arg-type]
    texts = [TEXT[place * 9 : place * 9 + 20] for place in range(6)]
    scores.continue_texts([(text, SamplingParams(temperature=0, max_tokens=5)) for text in texts])
    scores.log_likelihoods([(text, end) for text in texts for end in (" a", " b")])
    worker.close()
    return [repr(call) for call in calls]


def test_steps_do_not_depend_on_how_quickly_requests_come(tmp_path: Path) -> None:
    """Which sequences share a step decides the last bits of 4-bit weights."""
    quick = calls_of(tmp_path / "quick", iter(lambda: 0.0, 1.0))
    slow = calls_of(tmp_path / "slow", iter([0.0, *[0.02, 0.0] * 20]))
    assert len(quick) > 20
    assert quick == slow


def test_an_error_ends_everything(tmp_path: Path) -> None:
    told = threading.Event()

    def hold(_call: Call) -> None:
        if len(session.calls) > 3:
            assert told.wait(PATIENCE_S)

    def poison(call: Call, logits: Logits) -> None:
        logits[:] = np.nan if 300 in call.token_ids else logits

    session = make_session(slots=3, edit=poison, before_call=hold)
    worker = make_worker(tmp_path, session, bos_token_id=BOS)
    model = LocalModel(worker)
    requests = [
        ScoreRequest(str(place), TokenPrompt((5, 300 if place == 2 else 6)), (TokenPrompt((7,)),))
        for place in range(50)
    ]
    with pytest.raises(NonFiniteLogitsError):
        model.score(requests, lambda: None)
    told.set()
    assert len(model.score(requests[:1], lambda: None)) == 1
    assert len(session.calls) < 10
    worker.close()


class Full:
    """A client of a worker whose queue is full some times."""

    def __init__(self, client: WorkerClient, times: int) -> None:
        self._client = client
        self._lock = threading.Lock()
        self.times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def score(self, request: ScoreRequest) -> Any:
        with self._lock:
            self.times -= 1
            if self.times >= 0:
                raise QueueFullError("full", retry_after_s=2.5)
        return self._client.score(request)


def test_a_full_worker_is_asked_again_for_as_long_as_it_may_take(worker: Worker) -> None:
    waited: list[float] = []
    with running_server(worker) as running, WorkerClient(running.address) as client:
        model = RemoteModel(Full(client, 5), waited.append)  # type: ignore[arg-type]
        found = ModelScores(model, no_progress).log_likelihoods([("hello", " there"), ("who", " is")])
        assert len(found) == 2
        assert waited == [2.5] * 5
        waited.clear()
        never = RemoteModel(Full(client, 10**6), waited.append)  # type: ignore[arg-type]
        with pytest.raises(QueueFullError):
            ModelScores(never, no_progress).log_likelihoods([("hello", " there")])
        assert sum(waited) <= LONGEST_WAIT_S


def test_a_worker_that_serves_another_model_by_now_is_refused(worker: Worker) -> None:
    with running_server(worker) as running, WorkerClient(running.address) as client:
        scores = ModelScores(RemoteModel(client), no_progress)
        scores.info = replace(scores.info, fingerprint="another")
        with pytest.raises(ModelMismatchError):
            scores.log_likelihoods([("hello", " there")])
