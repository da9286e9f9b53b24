"""Failures and ends of requests of several answers, of scores and of forms: each request's own, and all of
it.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import replace

import pytest

from llorch_serve.config import EngineConfig
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import EngineStoppedError, InvalidRequestError, LibraryPanicError, QueueFullError
from llorch_serve.requests import ScoreRequest, TextPrompt, TokenPrompt
from llorch_serve.sampling.sampler import SamplingRow
from llorch_serve.structured.constraint import Constraint
from llorch_serve.structured.examiner import Examiner
from llorch_serve.structured.spec import Choice
from llorch_serve.text.token_bytes import TokenBytes
from llorch_serve.text.tokenizer import TextStream
from support.fakes.session import Call, continuation
from support.harness.worker import CONTEXT, PATIENCE_S, VOCAB, Sink, ask, make_session, make_worker, request

BAD, GOOD = (9, 9, 9), (8, 8)
SPOILT = continuation(BAD, 3, VOCAB)[2]


def scores(name, *continuations, **fields):
    return ScoreRequest(name, TokenPrompt(GOOD), tuple(map(TokenPrompt, continuations)), **fields)


def test_a_dead_engine_ends_every_request_once_whatever_it_waits_for(tmp_path, monkeypatch):
    pytest.importorskip("llguidance")
    go_on, come, released = threading.Event(), queue.SimpleQueue(), threading.Event()

    def refusal(_self, grammar):
        come.put(grammar)
        assert go_on.wait(PATIENCE_S)

    def before(_call):
        assert released.wait(PATIENCE_S)
        raise RuntimeError("no more")

    monkeypatch.setattr(Examiner, "refusal", refusal)
    worker = make_worker(tmp_path, make_session(before_call=before))
    sinks = {name: Sink() for name in ("several", "scores", "form")}
    worker.submit(request("several", GOOD, n=3), sinks["several"])
    worker.submit_score(scores("scores", (1,), (2,)), sinks["scores"])
    worker.submit(request("form", GOOD, n=2, structured=Choice(("yes",))), sinks["form"])
    come.get(timeout=PATIENCE_S)
    released.set()
    for name, sink in sinks.items():
        answer = sink.answers(name)[name]
        assert isinstance(answer.error, EngineStoppedError)
        assert len(answer.updates) == 1
    go_on.set()  # the grammar finds nobody who waits
    worker.close()
    assert all(sink.queue.empty() for sink in sinks.values())


def fail_in_text(monkeypatch):
    push = TextStream.push

    def failing(self, token_id):
        if token_id == SPOILT:
            raise UnicodeError("no text")
        return push(self, token_id)

    monkeypatch.setattr(TextStream, "push", failing)


def fail_in_sampling(monkeypatch):
    append = SamplingRow.append

    def failing(self, token_id):
        if token_id == SPOILT:
            raise MemoryError("no memory")
        append(self, token_id)

    monkeypatch.setattr(SamplingRow, "append", failing)


def fail_in_logprobs(monkeypatch):
    from llorch_serve.engine import containment

    inner = containment.score_token

    def failing(logits, token, *, top):
        if token == SPOILT:
            raise MemoryError("no memory")
        return inner(logits, token, top=top)

    monkeypatch.setattr(containment, "score_token", failing)


def panic_in_library(monkeypatch):
    of = TokenBytes.of

    class PanicException(BaseException):  # as that of pyo3 is
        pass

    def failing(self, token_id):
        if token_id == SPOILT:
            raise PanicException("index out of bounds")
        return of(self, token_id)

    monkeypatch.setattr(TokenBytes, "of", failing)


@pytest.mark.parametrize("fault", [fail_in_text, fail_in_sampling, fail_in_logprobs, panic_in_library])
@pytest.mark.parametrize("lookup", [0, 4])
def test_one_answers_failure_ends_its_request_whole_and_no_other(tmp_path, monkeypatch, fault, lookup):
    fault(monkeypatch)
    worker = make_worker(tmp_path, config=EngineConfig(prefill_chunk=4, lookup=lookup))
    try:
        sink = Sink()
        worker.submit(request("bad", BAD, n=2, max_tokens=9, logprobs=0, ignore_eos=True), sink)
        worker.submit(request("good", GOOD, max_tokens=9, logprobs=0, ignore_eos=True), sink)
        found = sink.answers("bad", "good")
        assert isinstance(found["bad"].error, (UnicodeError, MemoryError, LibraryPanicError))
        assert found["good"].ids == continuation(GOOD, 9, VOCAB)
        assert (worker.load().running, worker.load().waiting) == (0, 0)
        assert ask(worker, GOOD, "bad", max_tokens=2).ids == continuation(
            GOOD, 2, VOCAB
        )  # the id is free again
    finally:
        worker.close()


@pytest.mark.parametrize("at", ["mask", "advance"])
def test_a_form_that_fails_ends_its_request_and_no_other_form(tmp_path, monkeypatch, at):
    pytest.importorskip("llguidance")
    name = {"mask": "compute", "advance": "advance"}[at]
    inner, spoilt = getattr(Constraint, name), []

    def failing(self, *arguments):
        if not spoilt:
            spoilt.append(self)
        if self is spoilt[0]:
            raise MemoryError("no memory")
        return inner(self, *arguments)

    worker = make_worker(tmp_path)
    try:
        assert ask(worker, GOOD, structured=Choice(("reddish",))).text == "reddish"  # it is compiled
        monkeypatch.setattr(Constraint, name, failing)
        sink = Sink()
        for number in range(3):
            worker.submit(request(f"form{number}", GOOD, structured=Choice(("reddish",))), sink)
        found = sink.answers("form0", "form1", "form2")
    finally:
        worker.close()
    failed = [answer for answer in found.values() if answer.updates[-1].error]
    assert [type(answer.error) for answer in failed] == [MemoryError]
    assert [answer.text for answer in found.values() if answer not in failed] == ["reddish"] * 2


def test_an_abort_ends_all_answers_running_and_waiting(tmp_path):
    released = threading.Event()

    def before(_call: Call) -> None:
        assert released.wait(PATIENCE_S)

    worker = make_worker(tmp_path, make_session(slots=2, before_call=before))
    try:
        sink = Sink()
        aborts = [
            worker.submit(request("several", GOOD, n=4, max_tokens=30, ignore_eos=True), sink),
            worker.submit_score(scores("scores", (1,), (2,), (3,)), sink),
        ]
        for abort in aborts:
            abort()
        released.set()
        found = sink.answers("several", "scores")
        assert (worker.load().running, worker.load().waiting) == (0, 0)
    finally:
        worker.close()
    ends = [update.completion for update in found["several"].updates if update.completion is not None]
    assert [end.reason for end in ends] == [FinishReason.CANCELLED] * 4
    assert found["scores"].completion.reason is FinishReason.CANCELLED


def test_a_queue_counts_every_answers_and_every_scores_tokens(tmp_path):
    released, reached = threading.Event(), threading.Event()

    def before(_call: Call) -> None:
        reached.set()
        assert released.wait(PATIENCE_S)

    config = EngineConfig(prefill_chunk=4, max_waiting_tokens=10)
    worker = make_worker(tmp_path, make_session(slots=1, before_call=before), config=config)
    try:
        sink = Sink()
        worker.submit(request("slot", (1,), max_tokens=1), sink)
        assert reached.wait(PATIENCE_S)
        worker.submit(request("waits", (1, 2), max_tokens=1), sink)
        worker.submit(request("several", (1, 2, 3), n=3, max_tokens=1), sink)
        worker.submit_score(scores("scores", *[(1, 2)] * 3), sink)
        worker.submit_score(scores("fits", (1, 2), (1,), priority=3), sink)
        released.set()
        found = sink.answers("slot", "waits", "several", "scores", "fits")
    finally:
        worker.close()
    assert isinstance(found["several"].error, QueueFullError)
    assert isinstance(found["scores"].error, QueueFullError)
    assert "this request has 9" in str(found["several"].error)
    assert {update.score.token_count for update in found["fits"].updates} == {1, 2}


@pytest.mark.parametrize(("context", "expected"), [(48, 2**20), (2**21, 2**21)])
def test_a_queues_tokens_are_bounded_unless_told_by_the_cache_at_least_a_million(tmp_path, context, expected):
    worker = make_worker(tmp_path, make_session(slots=1, context=context))
    try:
        (engine,) = worker._engines
        assert engine._scheduler._waiting._most_tokens == expected
    finally:
        worker.close()


def test_a_callers_client_ids_are_its_own(tmp_path):
    """Nobody waits behind a stranger's requests because the stranger gives its name."""
    released, reached = threading.Event(), threading.Event()

    def before(_call: Call) -> None:
        reached.set()
        assert released.wait(PATIENCE_S)

    worker = make_worker(tmp_path, make_session(slots=1, before_call=before))
    try:
        sink = Sink()
        names = ("stranger-0", "stranger-1", "stranger-2", "mine")
        worker.submit(request("slot", (1,), max_tokens=1), sink)
        assert reached.wait(PATIENCE_S)
        for name in names:
            asked = request(name, (2, 3), max_tokens=1, ignore_eos=True)
            worker.submit(replace(asked, client_id="me", owner=name.split("-")[0]), sink)
        released.set()
        sink.answers("slot", *names)
    finally:
        worker.close()
    ended = [update.request_id for updates in sink.deliveries for update in updates if update.is_last]
    assert ended == ["slot", "stranger-0", "mine", "stranger-1", "stranger-2"]


def test_texts_that_no_context_holds_are_not_tokenised_for_scores(tmp_path, monkeypatch):
    worker = make_worker(tmp_path)
    try:
        monkeypatch.setattr(type(worker._tokenizer), "encode", lambda *_a, **_k: pytest.fail("tokenised"))
        huge = TextPrompt("a" * (CONTEXT * 4 * worker._tokenizer.longest_token + 1))
        for context, after, field in (
            (TokenPrompt(GOOD), huge, "continuations[0]"),
            (huge, TokenPrompt(GOOD), "context"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                worker.submit_score(ScoreRequest("s", context, (after,)), Sink())
            assert [v.field for v in caught.value.violations] == [field]
    finally:
        worker.close()
