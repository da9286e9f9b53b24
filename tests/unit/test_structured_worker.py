"""Forms of answers through a whole worker on a fake session: with every other parameter, and beside other
requests.
"""

from __future__ import annotations

import itertools
import queue
import re
import threading
from dataclasses import replace

import pytest

from llorch_serve.config import EngineConfig
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import (
    InvalidRequestError,
    LlorchError,
    RequestError,
    UnavailableError,
    UnsupportedError,
)
from llorch_serve.structured.constraint import Program
from llorch_serve.structured.examiner import Examiner
from llorch_serve.structured.spec import Choice, Grammar, JsonSchema, Regex
from llorch_serve.text.panics import panics_as_errors
from llorch_serve.worker.live_requests import LiveRequests
from support.builders.checkpoints import EOS_ID
from support.fakes.session import continuation
from support.harness.structured_walk import PATIENCE_S
from support.harness.worker import TOKENIZER, VOCAB, Sink, ask, make_session, make_worker, request, script

pytest.importorskip("llguidance")

PROMPT = (40, 41, 42, 43, 44, 45)
OPTIONS = ("red", "green", "blue sky", "reddish")


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.fixture
def worker(tmp_path):
    made = make_worker(tmp_path)
    yield made
    made.close()


@pytest.fixture
def held_up(monkeypatch):
    go_on, come = threading.Event(), queue.SimpleQueue()

    def refusal(_self, grammar):
        come.put(grammar)
        assert go_on.wait(PATIENCE_S)
        return

    monkeypatch.setattr(Examiner, "refusal", refusal)
    yield go_on, come
    go_on.set()


KNOBS = [
    {"temperature": 0},
    {"temperature": 1, "seed": 3},
    {"temperature": 2, "top_k": 1, "seed": 1},
    {"temperature": 1.5, "top_p": 0.01, "seed": 2},
    {"temperature": 1, "min_p": 1, "seed": 2},
    {"temperature": 1, "repetition_penalty": 0.001, "seed": 4},
    {"temperature": 0, "repetition_penalty": 2},
    {"temperature": 1, "min_tokens": 30, "max_tokens": 40, "seed": 5},
    {"temperature": 1, "ignore_eos": True, "seed": 6},
    {"temperature": 1, "typical_p": 0.5, "top_p": 0.999, "seed": 7},
    {"temperature": 1, "typical_p": 0.9, "seed": 7},
    {"temperature": 0, "frequency_penalty": 2, "presence_penalty": -2},
    {"temperature": 1, "top_k": 300, "logit_bias": dict.fromkeys(range(300), 100.0), "seed": 8},
    {"temperature": 0, "logit_bias": dict.fromkeys(range(300), 100.0), "logprobs": 3},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: ",".join(knobs))
@pytest.mark.parametrize("lookup", [0, 8])
def test_the_form_holds_under_every_parameter(tmp_path, knobs, lookup):
    worker = make_worker(tmp_path, config=EngineConfig(prefill_chunk=4, lookup=lookup))
    try:
        for _ in range(3):
            answer = ask(worker, PROMPT, structured=Choice(OPTIONS), **knobs)
            assert answer.text in OPTIONS
            assert answer.completion.reason is FinishReason.STOP
    finally:
        worker.close()


def test_a_forbidden_token_is_not_chosen_however_likely(tmp_path):
    worker = make_worker(tmp_path, make_session(rule=script(PROMPT, ids_of("never this"))))
    assert ask(worker, PROMPT, structured=Regex("[0-9]{4}")).text.isdigit()
    worker.close()


def test_an_answer_that_the_grammar_allows_is_the_models_own(tmp_path):
    worker = make_worker(tmp_path, make_session(rule=script(PROMPT, ids_of("blue sky"))))
    answer = ask(worker, PROMPT, structured=Choice(OPTIONS))
    assert answer.text == "blue sky"
    # The grammar ends it, without a model call for a stop token.
    assert answer.completion.stop_matched is None
    assert answer.completion.generated_tokens == len(answer.ids)
    worker.close()


def test_the_model_may_end_where_the_grammar_may(tmp_path):
    worker = make_worker(tmp_path, make_session(rule=script(PROMPT, (*ids_of("red"), EOS_ID))))
    answer = ask(worker, PROMPT, structured=Choice(OPTIONS))
    assert (answer.text, answer.completion.reason) == ("red", FinishReason.STOP)
    assert answer.completion.stop_matched is not None
    worker.close()


@pytest.mark.parametrize("knob", [{"ignore_eos": True}, {"min_tokens": 20}], ids=str)
def test_where_stops_are_not_wanted_the_grammar_goes_on(tmp_path, knob):
    worker = make_worker(tmp_path, make_session(rule=script(PROMPT, (*ids_of("red"), EOS_ID))))
    answer = ask(worker, PROMPT, structured=Choice(OPTIONS), max_tokens=30, **knob)
    assert (answer.text, answer.completion.reason) == ("reddish", FinishReason.STOP)
    worker.close()


def test_a_form_of_nothing_gives_nothing(worker):
    for knobs in ({}, {"ignore_eos": True}, {"min_tokens": 3}):
        answer = ask(worker, PROMPT, structured=Regex("(){2}"), **knobs)
        assert (answer.text, answer.ids) == ("", [])
        assert answer.completion.reason is FinishReason.STOP


def test_max_tokens_cuts_the_form(worker):
    answer = ask(worker, PROMPT, structured=Regex("[a-z]{20,}"), max_tokens=3)
    assert (len(answer.ids), answer.completion.reason) == (3, FinishReason.LENGTH)


def test_a_form_that_is_complete_with_the_last_token_has_not_been_cut(tmp_path):
    worker = make_worker(tmp_path, make_session(rule=script(PROMPT, ids_of("blue sky"))))
    answer = ask(worker, PROMPT, structured=Choice(OPTIONS), max_tokens=len(ids_of("blue sky")))
    assert answer.completion.reason is FinishReason.STOP
    worker.close()


def test_a_stop_string_cuts_the_form(tmp_path):
    worker = make_worker(tmp_path, make_session(rule=script(PROMPT, ids_of("blue sky"))))
    answer = ask(worker, PROMPT, structured=Choice(OPTIONS), stop=("e s",))
    assert (answer.text, answer.completion.stop_matched) == ("blu", "e s")
    worker.close()


def test_the_same_seed_gives_the_same_answer_with_and_without_guesses(tmp_path):
    answers = []
    for name, lookup in (("plain", 0), ("guessing", 8)):
        worker = make_worker(tmp_path / name, config=EngineConfig(prefill_chunk=4, lookup=lookup))
        form = Regex("((ab|cd) ){8}end")
        answers.append(
            [ask(worker, PROMPT, structured=form, temperature=1, seed=seed).ids for seed in range(8)]
        )
        worker.close()
    assert answers[0] == answers[1]


def test_right_guesses_are_used_under_a_grammar(tmp_path):
    text = "ab cd ef gh ab cd ef gh ab cd ef gh"
    session = make_session(rule=script(PROMPT, ids_of(text)), context=96)
    worker = make_worker(tmp_path, session, config=EngineConfig(prefill_chunk=4, lookup=8))
    answer = ask(worker, PROMPT, structured=Regex("([a-h]{2} ?)+"), max_tokens=len(ids_of(text)))
    assert answer.text == text
    assert answer.completion.accepted_tokens > 4
    worker.close()


def test_a_draft_that_completes_the_form_ends_it(tmp_path):
    text = "ab cd ef ab cd ef ab cd ef ab"
    session = make_session(rule=script(PROMPT, ids_of(text)), context=96)
    worker = make_worker(tmp_path, session, config=EngineConfig(prefill_chunk=4, lookup=8))
    answer = ask(worker, PROMPT, structured=Regex("(ab cd ef ){3}ab"))
    assert (answer.text, answer.completion.reason) == (text, FinishReason.STOP)
    assert answer.completion.stop_matched is None
    worker.close()


def test_neighbours_get_the_tokens_they_would_get_alone(worker):
    prompts = [tuple(range(start, start + 5)) for start in range(20, 100, 10)]
    alone = [continuation(prompt, 12, VOCAB, stop_ids=()) for prompt in prompts]
    sink = Sink()
    for index, prompt in enumerate(prompts):
        free = request(f"free-{index}", prompt, max_tokens=12, ignore_eos=True)
        held = request(
            f"held-{index}", prompt, max_tokens=12, structured=Regex("[a-z ]{5,40}"), temperature=1, seed=1
        )
        for asked in (free, held) if index % 2 else (held, free):
            worker.submit(asked, sink)
    names = [f"{kind}-{index}" for kind, index in itertools.product(("free", "held"), range(len(prompts)))]
    answers = sink.answers(*names)
    assert [answers[f"free-{index}"].ids for index in range(len(prompts))] == alone
    assert all(re.fullmatch("[a-z ]+", answers[f"held-{index}"].text) for index in range(len(prompts)))


def test_without_a_kv_cache_the_form_is_the_same(tmp_path):
    found = []
    for name, kv_cache in (("kept", True), ("anew", False)):
        worker = make_worker(tmp_path / name, config=EngineConfig(prefill_chunk=4, kv_cache=kv_cache))
        found.append(ask(worker, PROMPT, structured=Regex("[a-z]{12}"), temperature=1, seed=9).ids)
        worker.close()
    assert found[0] == found[1]


class PanicException(BaseException):
    """What pyo3 raises where a library in Rust panics."""


class Panicking:
    """A matcher that panics at one of its methods, and so does every copy of it."""

    def __init__(self, inner, method):
        self._inner, self._method = inner, method

    def deep_copy(self):
        if self._method == "deep_copy":
            raise PanicException("index out of bounds")
        return Panicking(self._inner.deep_copy(), self._method)

    def __getattr__(self, name):
        if name == self._method:
            raise PanicException("index out of bounds")
        return getattr(self._inner, name)


MATCHER_METHODS = ["deep_copy", "consume_token", "compute_bitmask", "is_accepting", "is_stopped", "is_error"]


@pytest.mark.parametrize("lookup", [0, 8])
@pytest.mark.parametrize("method", MATCHER_METHODS)
def test_a_panic_in_an_answers_grammar_is_its_own(tmp_path, monkeypatch, method, lookup):
    """On the engine's thread, on that of masks, or where a request is submitted."""
    begin = Program.begin

    def panicking(self, stop_ids):
        return begin(replace(self, matcher=Panicking(self.matcher, method)), stop_ids)

    worker = make_worker(tmp_path, config=EngineConfig(prefill_chunk=4, lookup=lookup))
    form = Regex("[a-z ]{12}")
    try:
        for rounds in range(2):  # compiled for it, and known
            monkeypatch.setattr(Program, "begin", panicking)
            sink = Sink()
            worker.submit(request("free", PROMPT, max_tokens=12, ignore_eos=True), sink)
            worker.submit(request("held", PROMPT, structured=form, max_tokens=12), sink)
            answers = sink.answers("free", "held")
            error = answers["held"].error
            assert isinstance(error, LlorchError)
            assert not isinstance(error, RequestError), "whoever runs the worker should hear of it"
            assert str(error).startswith("llguidance failed in its own code (PanicException)"), (
                "no word of the panic"
            )
            assert answers["free"].ids == continuation(PROMPT, 12, VOCAB)
            monkeypatch.setattr(Program, "begin", begin)
            held = ask(worker, PROMPT, "held", structured=form, max_tokens=12)
            assert len(held.text) == 12, rounds
        assert (worker.load().running, worker.load().waiting) == (0, 0)
    finally:
        worker.close()


def test_the_users_own_interruption_is_no_panic():
    for passes in (KeyboardInterrupt, SystemExit, GeneratorExit, ValueError):
        with pytest.raises(passes), panics_as_errors("llguidance"):
            raise passes


# Compiling.


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (Regex("("), "sampling.regex"),
        (Grammar("start: nothing"), "sampling.grammar"),
        (JsonSchema('{"type": 5}'), "sampling.json_schema"),
    ],
)
def test_a_bad_form_ends_its_request_alone(worker, form, field):
    error = ask(worker, PROMPT, structured=form).error
    assert isinstance(error, InvalidRequestError)
    assert error.violations[0].field == field
    assert ask(worker, PROMPT, max_tokens=3, ignore_eos=True).ids == continuation(PROMPT, 3, VOCAB)


def test_every_answer_of_a_request_keeps_its_form(worker):
    sink = Sink()
    worker.submit(request("r", PROMPT, structured=Choice(OPTIONS), temperature=1, seed=1, n=4), sink)
    updates = []
    while not (updates and updates[-1].is_last):
        updates += sink.next()
    texts = ["".join(u.text for u in updates if u.index == index) for index in range(4)]
    assert set(texts) <= set(OPTIONS)
    assert len(set(texts)) > 1
    best = ask(worker, PROMPT, "best", structured=Choice(OPTIONS), temperature=1, seed=1, best_of=4)
    assert best.text in texts


def test_a_bad_form_ends_all_answers_of_its_request_once(worker):
    error = ask(worker, PROMPT, structured=Regex("("), n=3).error
    assert isinstance(error, InvalidRequestError)


def test_all_answers_that_wait_for_a_grammar_are_aborted(worker, held_up):
    _, come = held_up
    sink = Sink()
    abort = worker.submit(request("held", PROMPT, structured=Choice(("yes",)), n=3), sink)
    come.get(timeout=PATIENCE_S)
    abort()
    updates = sink.next()
    assert [u.completion.reason for u in updates] == [FinishReason.CANCELLED] * 3
    assert [u.is_last for u in updates] == [False, False, True]


def test_a_size_is_refused_before_anything_else(worker):
    with pytest.raises(InvalidRequestError, match=r"sampling\.regex: found 0 bytes"):
        worker.submit(request("r", PROMPT, structured=Regex("")), Sink())


def test_others_run_while_a_grammar_is_compiled(worker, held_up):
    go_on, come = held_up
    sink = Sink()
    worker.submit(request("held", PROMPT, structured=Choice(("yes",))), sink)
    come.get(timeout=PATIENCE_S)
    assert ask(worker, PROMPT, "free", max_tokens=5, ignore_eos=True).ids == continuation(PROMPT, 5, VOCAB)
    go_on.set()
    assert sink.answers("held")["held"].text == "yes"


def test_callers_that_are_known_compile_their_own(worker, held_up):
    go_on, come = held_up
    go_on.set()
    for number, owner in enumerate(("a", "b", "a", "b")):
        sink = Sink()
        worker.submit(replace(request("held", PROMPT, structured=Choice(("yes",))), owner=owner), sink)
        assert sink.answers("held")["held"].text == "yes"
        assert come.qsize() == min(number + 1, 2)


def test_a_request_that_waits_for_its_grammar_can_be_aborted(worker, held_up):
    go_on, come = held_up
    sink = Sink()
    abort = worker.submit(request("held", PROMPT, structured=Choice(("yes",))), sink)
    come.get(timeout=PATIENCE_S)
    abort()
    assert sink.answers("held")["held"].completion.reason is FinishReason.CANCELLED
    abort()
    go_on.set()
    # The name is free again, and what was compiled for nobody does not end this one.
    worker.submit(request("held", PROMPT, structured=Choice(("no",))), sink)
    while not any(update.text == "no" or update.error for updates in sink.deliveries for update in updates):
        sink.next()


@pytest.mark.parametrize("closing", [True, False], ids=["close", "abort"])
def test_a_grammar_that_comes_too_late_starts_nothing(tmp_path, monkeypatch, closing):
    """The compiler no longer knows who waits, and the engine does not know it yet."""
    go_on, come = threading.Event(), threading.Event()
    on_grammar = LiveRequests._on_grammar

    def slowly(*arguments):
        come.set()
        assert go_on.wait(PATIENCE_S)
        on_grammar(*arguments)

    monkeypatch.setattr(LiveRequests, "_on_grammar", slowly)
    session = make_session()
    worker = make_worker(tmp_path, session)
    sink = Sink()
    abort = worker.submit(request("held", PROMPT, structured=Choice(("yes",))), sink)
    assert come.wait(PATIENCE_S)
    thread = threading.Thread(target=worker.close if closing else abort)
    thread.start()
    if not closing:  # which waits for the compiler
        thread.join(PATIENCE_S)
    else:
        assert closed(worker)
    go_on.set()
    assert sink.answers("held")["held"].completion.reason is FinishReason.CANCELLED
    thread.join(PATIENCE_S)
    assert session.calls == []
    worker.close()


def closed(worker):
    """Wait until the worker takes nothing more."""
    while True:
        try:
            worker.submit(request("probe", PROMPT, max_tokens=0), Sink())
        except UnavailableError:
            return True


def test_closing_ends_what_waits_for_its_grammar(tmp_path, held_up):
    go_on, come = held_up
    worker = make_worker(tmp_path)
    sink = Sink()
    worker.submit(request("held", PROMPT, structured=Choice(("yes",))), sink)
    come.get(timeout=PATIENCE_S)
    closing = threading.Thread(target=worker.close)
    closing.start()
    assert sink.answers("held")["held"].completion.reason is FinishReason.CANCELLED
    go_on.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_without_the_library_the_request_is_told(worker, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    worker.warm_up()
    with pytest.raises(UnsupportedError, match=r"llorch\[structured\]"):
        worker.submit(request("held", PROMPT, structured=Choice(("yes",))), Sink())
    assert ask(worker, PROMPT, "held", max_tokens=2, ignore_eos=True).ids == continuation(PROMPT, 2, VOCAB)
