"""Observers see every request, and nothing that passes is changed or held up by them."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import InvalidRequestError, NonFiniteLogitsError, QueueFullError
from llorch_serve.observe.tap import ObservedGenerator
from llorch_serve.requests import (
    Completion,
    ContinuationScore,
    GenerationRequest,
    GenerationUpdate,
    RankRequest,
    ScoreRequest,
    TextPrompt,
    Timings,
)
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.worker.local import stream
from support.fakes.generator import FakeGenerator


class Recorder:
    def __init__(self):
        self.log = []
        self.closed = False

    def begun(self, seen):
        self.log.append(("begun", seen.request.request_id))

    def produced(self, seen, tokens, gap_s):
        self.log.append(("produced", seen.request.request_id, tokens, gap_s is None))

    def ended(self, seen, ending):
        self.log.append(("ended", seen.request.request_id, ending))

    def close(self):
        self.closed = True


def request(request_id="a", tokens=2, **sampling):
    return GenerationRequest(request_id, TextPrompt("Hi"), SamplingParams(max_tokens=tokens, **sampling))


@pytest.fixture
def observed():
    inner, recorder = FakeGenerator(), Recorder()
    generator = ObservedGenerator(inner, [recorder])
    yield generator, inner, recorder
    if not inner.closed:
        generator.close()


def test_a_request_is_followed_from_its_coming_to_its_end(observed):
    generator, _, recorder = observed
    updates = list(stream(generator, request()))
    assert [u.text for u in updates] == ["w0 ", "w1 "]
    generator.settle()
    *before, last = recorder.log
    assert before == [("begun", "a"), ("produced", "a", 1, True), ("produced", "a", 1, False)]
    assert last[:2] == ("ended", "a")
    assert last[2].completion == updates[-1].completion


def test_an_update_without_tokens_is_none(observed):
    generator, _, recorder = observed
    list(stream(generator, request(tokens=None, stop=("w1",))))
    generator.settle()
    assert [entry[0] for entry in recorder.log] == ["begun", "produced", "ended"]


def scored(request_id="s", *continuations):
    return ScoreRequest(request_id, TextPrompt("Hi"), tuple(TextPrompt(text) for text in continuations))


def ask(generator, request):
    updates = []
    generator.submit_score(request, SimpleNamespace(deliver=updates.extend))
    return updates


def test_a_request_for_scores_is_followed_too(observed):
    generator, _, recorder = observed
    updates = ask(generator, scored("s", "a", "bcd"))
    assert [update.score.token_count for update in updates] == [1, 3]
    generator.settle()
    (begun, ended) = recorder.log
    assert begun == ("begun", "s")
    assert ended[:2] == ("ended", "s")
    assert ended[2].scored
    assert ended[2].completion.prompt_tokens == len("Hi") + 1 + 3


def test_tokens_of_all_documents_are_counted(observed, monkeypatch):
    generator, inner, recorder = observed
    end = Completion(FinishReason.LENGTH, None, 1, 0, 0, Timings(0, 0, 0))
    updates = [
        GenerationUpdate("k", "", (), end, index=index, score=ContinuationScore(-1.0, True, 1, tokens, 0, ()))
        for index, tokens in enumerate((10, 10, 300, 300))
    ]
    updates = [replace(update, open_answers=left) for left, update in zip((3, 2, 1, 0), updates, strict=True)]

    def submit_rank(_, sink):
        sink.deliver(updates)
        return lambda: None

    monkeypatch.setattr(inner, "submit_rank", submit_rank, raising=False)
    generator.submit_rank(RankRequest("k", "query", ("a", "b")), SimpleNamespace(deliver=lambda _: None))
    generator.settle()
    assert recorder.log[-1][2].completion.prompt_tokens == 10 + 300 + 4


def test_a_refused_request_for_scores_ends_with_its_error(observed):
    generator, inner, recorder = observed
    inner.fail_submit = QueueFullError("full", retry_after_s=1)
    with pytest.raises(QueueFullError):
        ask(generator, scored("s", "a"))
    generator.settle()
    assert type(recorder.log[-1][2].error) is QueueFullError


def test_scores_that_were_given_up_are_cancelled(observed, monkeypatch):
    generator, inner, recorder = observed
    whole = FakeGenerator.submit_score

    def broken_off(request, sink):
        def deliver(updates):
            last = replace(updates[-1].completion, reason=FinishReason.CANCELLED)
            sink.deliver([*updates[:-1], replace(updates[-1], score=None, completion=last)])

        whole(inner, request, SimpleNamespace(deliver=deliver))

    monkeypatch.setattr(inner, "submit_score", broken_off)
    ask(generator, scored("s", "a", "b"))
    generator.settle()
    ending = recorder.log[-1][2]
    assert (ending.scored, ending.completion.reason) == (False, FinishReason.CANCELLED)


def test_refusals_failures_and_aborts_end_too(observed):
    generator, inner, recorder = observed
    with pytest.raises(InvalidRequestError):
        list(stream(generator, request("bad", temperature=9)))
    inner.fail_submit = QueueFullError("full", retry_after_s=1)
    with pytest.raises(QueueFullError):
        list(stream(generator, request("full")))
    inner.fail_submit, inner.fail_step = None, NonFiniteLogitsError("nan")
    with pytest.raises(NonFiniteLogitsError):
        list(stream(generator, request("nan")))
    inner.fail_step = None
    answer = stream(generator, request("left", tokens=None))
    next(answer)
    answer.close()
    inner.wait_for(lambda g: not g.live_ids)
    generator.settle()
    ended = {entry[1]: entry[2] for entry in recorder.log if entry[0] == "ended"}
    assert {name: type(ending.error) for name, ending in ended.items() if ending.error} == {
        "bad": InvalidRequestError,
        "full": QueueFullError,
        "nan": NonFiniteLogitsError,
    }
    assert ended["left"].completion.reason is FinishReason.CANCELLED


def test_a_step_reaches_a_sink_in_one_call():
    inner = FakeGenerator(free_running=False)
    generator = ObservedGenerator(inner, [])
    calls, came = [], threading.Semaphore(0)

    class Sink:
        def deliver(self, updates):
            calls.append([u.request_id for u in updates])
            came.release()

    sink = Sink()
    for name in "abc":
        generator.submit(request(name, tokens=1), sink)
    inner.step()
    assert came.acquire(timeout=20)
    assert calls == [["a", "b", "c"]]
    generator.close()


def test_an_observer_that_fails_harms_nobody(observed, caplog):
    generator, _, recorder = observed
    recorder.produced = None
    assert len(list(stream(generator, request("a")))) == 2
    generator.settle()
    assert "an observer failed" in caplog.text
    assert len(list(stream(generator, request("b")))) == 2


def test_closing_tells_the_observers_last(observed):
    generator, inner, recorder = observed
    inner.submit_gate = None
    sink_updates = []

    class Sink:
        def deliver(self, updates):
            sink_updates.extend(updates)

    generator.submit(request("a", tokens=None), Sink())
    generator.close()
    assert recorder.closed
    assert recorder.log[-1][:2] == ("ended", "a")


def test_a_request_may_take_the_id_of_one_whose_end_is_just_being_told(observed):
    generator, inner, recorder = observed
    ended = []

    class Sink:
        def deliver(self, updates):
            ended.extend(updates)
            if len(ended) == 1:  # the caller has its answer, and is quick to ask again
                generator.submit(request("a", tokens=1), self)

    generator.submit(request("a", tokens=1), Sink())
    inner.wait_for(lambda g: len(ended) == 2)
    generator.settle()
    assert [entry[0] for entry in recorder.log] == ["begun", "produced", "ended"] * 2
