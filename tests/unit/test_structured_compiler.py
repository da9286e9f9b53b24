"""Compiling beside everything else: once for each form, bounded, cancellable, and told to all who wait."""

from __future__ import annotations

import queue
import sys
import threading

import pytest

from llorch_serve.errors import LibraryPanicError, QueueFullError, UnsupportedError
from llorch_serve.structured import compiler as compiler_module
from llorch_serve.structured.compiler import GrammarCompiler
from llorch_serve.structured.constraint import Program
from llorch_serve.structured.examiner import Examiner
from llorch_serve.structured.spec import Choice, Grammar, Regex
from llorch_serve.text.tokenizer import Tokenizer
from support.builders.checkpoints import EOS_ID, tiny_tokenizer_json
from support.harness.structured_walk import PATIENCE_S, allowed, compiled, constrained

pytest.importorskip("llguidance")


class PanicException(BaseException):
    """What pyo3 raises where a library in Rust panics."""


TOKENIZER = Tokenizer.from_json(tiny_tokenizer_json().encode(), origin="tiny")
STOPS = frozenset((EOS_ID,))


@pytest.fixture
def compiler():
    made = GrammarCompiler(TOKENIZER, 512, STOPS, most_tokens=2**20)
    yield made
    made.close()


@pytest.fixture
def held_up(monkeypatch):
    """Examinations that wait: an event that lets them go on, and a queue of what has come to be examined."""
    go_on, come = threading.Event(), queue.SimpleQueue()

    def refusal(_self, grammar):
        come.put(grammar)
        assert go_on.wait(PATIENCE_S)
        return

    monkeypatch.setattr(Examiner, "refusal", refusal)
    yield go_on, come
    go_on.set()


def test_a_known_form_is_there_at_once(compiler):
    constrained(compiler, Regex("a+"))
    again = compiler.begin(Regex("a+"), ticket=1, done=lambda _: None)
    assert isinstance(again, Program)


def test_answers_of_one_form_do_not_share_their_place(compiler):
    first, second = (constrained(compiler, Regex("ab"), STOPS) for _ in range(2))
    before = allowed(second)
    first.advance(allowed(first)[0])
    assert allowed(second) == before


def test_only_the_last_used_forms_are_kept(compiler, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    for pattern in ("a", "b", "a", "c"):
        constrained(compiler, Regex(pattern))
    known = {
        pattern: compiler.begin(Regex(pattern), ticket=1, done=lambda _: None) is not None
        for pattern in ("a", "c", "b")
    }
    assert known == {"a": True, "c": True, "b": False}


def test_all_who_wait_for_a_form_are_told_of_one_compilation(compiler, held_up):
    go_on, come = held_up
    found = queue.SimpleQueue()
    for ticket in range(3):
        assert compiler.begin(Regex("a"), ticket=ticket, done=found.put) is None
    go_on.set()
    assert all(isinstance(found.get(timeout=PATIENCE_S), Program) for _ in range(3))
    assert come.qsize() == 1


def test_who_has_cancelled_is_not_told(compiler, held_up):
    go_on, come = held_up
    found = queue.SimpleQueue()
    for ticket in ("stays", "goes"):
        compiler.begin(Regex("a"), ticket=ticket, done=lambda _, ticket=ticket: found.put(ticket))
    come.get(timeout=PATIENCE_S)
    assert compiler.cancel("goes")
    assert not compiler.cancel("goes")
    go_on.set()
    assert found.get(timeout=PATIENCE_S) == "stays"
    constrained(compiler, Regex("b"))  # compiled after it, so nothing of the first is under way any more
    assert found.empty()


def test_what_nobody_waits_for_is_not_compiled(compiler, held_up):
    go_on, come = held_up
    compiler.begin(Regex("a"), ticket=1, done=lambda _: None)
    come.get(timeout=PATIENCE_S)
    compiler.begin(Regex("b"), ticket=2, done=lambda _: None)
    compiler.cancel(2)
    go_on.set()
    constrained(compiler, Regex("c"))
    assert "c" in come.get(timeout=PATIENCE_S)
    assert isinstance(compiled(compiler, Regex("b")), Program)


def test_too_many_forms_are_turned_away(compiler, held_up, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_WAITING", 2)
    for pattern in ("a", "b"):
        compiler.begin(Regex(pattern), ticket=pattern, done=lambda _: None)
    with pytest.raises(QueueFullError, match="2 grammars wait"):
        compiler.begin(Regex("c"), ticket="c", done=lambda _: None)
    compiler.begin(Regex("a"), ticket="more of the same", done=lambda _: None)


def test_requests_that_wait_for_a_grammar_are_bounded(compiler, held_up, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_REQUESTS", 3)
    for ticket, pattern in enumerate("aab"):
        compiler.begin(Regex(pattern), ticket=ticket, done=lambda _: None)
    with pytest.raises(QueueFullError, match="3 requests wait for their grammars"):
        compiler.begin(Regex("a"), ticket=3, done=lambda _: None)
    assert compiler.cancel(0)
    compiler.begin(Regex("a"), ticket=3, done=lambda _: None)


def test_without_the_library_the_pip_line_is_told(compiler, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler.prepare()
    with pytest.raises(UnsupportedError, match=r"pip install 'llorch\[structured\]'"):
        compiler.begin(Regex("a"), ticket=1, done=lambda _: None)


def test_a_tokenizer_that_the_library_cannot_read_is_named():
    odd = Tokenizer.from_json(
        b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}',
        origin="odd",
    )
    made = GrammarCompiler(odd, 1, frozenset(), most_tokens=2**20)
    try:
        made.prepare()
        with pytest.raises(UnsupportedError, match=r"tokenizer\.json"):
            made.begin(Choice(("a",)), ticket=1, done=lambda _: None)
    finally:
        made.close()


def test_a_vocabulary_that_cannot_be_made_is_tried_once(monkeypatch):
    """It takes a second, holds the interpreter, and is there for any caller to ask for again and again."""
    tried = []

    def build(*arguments):
        tried.append(arguments)
        raise UnsupportedError("not with this tokenizer.json")

    monkeypatch.setattr(compiler_module, "build", build)
    made = GrammarCompiler(TOKENIZER, 512, STOPS, most_tokens=2**20)
    try:
        assert isinstance(compiled(made, Regex("a")), UnsupportedError)
        for _ in range(3):
            with pytest.raises(UnsupportedError, match=r"not with this tokenizer\.json"):
                made.begin(Regex("b"), ticket=1, done=lambda _: None)
        made.prepare()
    finally:
        made.close()
    assert len(tried) == 1


def test_a_panic_over_a_vocabulary_is_one_that_cannot_be_made(monkeypatch):
    def panicking(*_arguments, **_keywords):
        raise PanicException("index out of bounds")

    monkeypatch.setattr("llguidance.LLTokenizer", panicking)
    made = GrammarCompiler(TOKENIZER, 512, STOPS, most_tokens=2**20)
    try:
        made.prepare()
        with pytest.raises(UnsupportedError, match="failed in its own code"):
            made.begin(Regex("a"), ticket=1, done=lambda _: None)
    finally:
        made.close()


@pytest.mark.parametrize("failure", [RuntimeError, PanicException], ids=["error", "panic"])
def test_a_callback_that_fails_keeps_nothing_from_the_others(compiler, held_up, caplog, failure):
    go_on, come = held_up
    found = queue.SimpleQueue()

    def failing(_found):
        raise failure("boom")

    compiler.begin(Regex("a"), ticket="fails", done=failing)
    compiler.begin(Regex("a"), ticket="waits", done=found.put)
    come.get(timeout=PATIENCE_S)
    go_on.set()
    assert isinstance(found.get(timeout=PATIENCE_S), Program)
    assert isinstance(compiled(compiler, Regex("b")), Program)
    assert ("boom" if failure is RuntimeError else "failed in its own code") in caplog.text


def test_a_panic_is_told_as_an_error(compiler, monkeypatch):
    def refusal(_self, _grammar):
        raise PanicException("boom")

    monkeypatch.setattr(Examiner, "refusal", refusal)
    error = compiled(compiler, Regex("a"))
    assert isinstance(error, LibraryPanicError)


# What one caller may cost the others.


def test_a_form_is_known_to_its_own_cache_salt_alone(compiler):
    """By the time it takes, one would learn what others have asked for."""
    found = queue.SimpleQueue()
    for salt in ("a", "b"):
        assert compiler.begin(Regex("a+"), ticket=salt, done=found.put, cache_salt=salt) is None
        assert isinstance(found.get(timeout=PATIENCE_S), Program)
    known = [compiler.begin(Regex("a+"), ticket=salt, done=found.put, cache_salt=salt) for salt in ("a", "b")]
    assert all(isinstance(program, Program) for program in known)
    assert known[0] is not known[1], "what one answer does to its states shows in another's"


def test_clients_take_turns(compiler, held_up):
    go_on, come = held_up
    told = queue.SimpleQueue()
    forms = [("greedy", pattern) for pattern in "abcd"] + [("patient", "e"), ("patient", "f")]
    for client, pattern in forms:
        compiler.begin(
            Regex(pattern), ticket=pattern, done=lambda _, name=pattern: told.put(name), client=client
        )
        if pattern == "a":
            come.get(timeout=PATIENCE_S)  # is under way
    go_on.set()
    assert [told.get(timeout=PATIENCE_S) for _ in forms] == ["a", "b", "e", "c", "f", "d"]


def test_one_client_leaves_room_for_the_forms_of_others(compiler, held_up, monkeypatch):
    _, come = held_up
    monkeypatch.setattr(compiler_module, "MAX_OF_CLIENT", 2)
    compiler.begin(Regex("a"), ticket=1, done=lambda _: None, client="greedy")
    come.get(timeout=PATIENCE_S)
    for pattern in ("b", "c"):
        compiler.begin(Regex(pattern), ticket=pattern, done=lambda _: None, client="greedy")
    with pytest.raises(QueueFullError, match="2 grammars of this client"):
        compiler.begin(Regex("d"), ticket="d", done=lambda _: None, client="greedy")
    compiler.begin(Regex("b"), ticket="more of the same", done=lambda _: None, client="greedy")
    compiler.begin(Regex("d"), ticket="d", done=lambda _: None, client="patient")


def test_prompts_that_wait_for_a_grammar_are_bounded_by_their_tokens(held_up):
    made = GrammarCompiler(TOKENIZER, 512, STOPS, most_tokens=10)
    try:
        made.begin(Regex("a"), ticket=0, done=lambda _: None, tokens=25)  # alone one may always wait
        with pytest.raises(QueueFullError, match=r"25 tokens of prompts .* has 1, .* is 10"):
            made.begin(Regex("a"), ticket=1, done=lambda _: None, tokens=1)
        assert made.cancel(0)
        made.begin(Regex("a"), ticket=1, done=lambda _: None, tokens=4)
        made.begin(Regex("b"), ticket=2, done=lambda _: None, tokens=6)
    finally:
        held_up[0].set()
        made.close()


LARGE = "\n".join(
    ["start: " + " ".join(f"r{i}" for i in range(1000)), *(f'r{i}: "{i}"' for i in range(1000))]
)


def large(number):
    return Grammar(f'{LARGE}\nother: "{number}"')


def test_what_compiled_forms_take_is_measured(compiler):
    small, program = (compiled(compiler, form) for form in (Regex("a"), large(0)))
    assert small.size < 2**20 < program.size < 2**26


def test_kept_forms_are_bounded_by_their_bytes(compiler, monkeypatch):
    size = compiled(compiler, large(0)).size
    monkeypatch.setattr(compiler_module, "MAX_PROGRAM_BYTES", int(2.5 * size))
    for number in range(1, 4):
        assert isinstance(compiled(compiler, large(number)), Program)
    known = [
        compiler.begin(large(number), ticket=number, done=lambda _: None) is not None
        for number in (0, 1, 2, 3)
    ]
    assert known == [False, False, True, True]


def test_forms_of_requests_are_bounded_by_their_bytes(compiler, monkeypatch):
    """However many requests wait: each holds its own grammar until it has ended."""
    held = [constrained(compiler, large(0))]
    monkeypatch.setattr(compiler_module, "MAX_PROGRAM_BYTES", int(1.5 * held[0]._program.size))
    error = compiled(compiler, large(1))
    assert isinstance(error, QueueFullError)
    assert "try again" in str(error)
    held.clear()
    assert isinstance(compiled(compiler, large(1)), Program)


def test_a_compiler_without_a_thread_promises_nothing(compiler, monkeypatch):
    """The machine has no thread left: the request is told, and the next one of its form does not wait for
    nothing.
    """
    submit = compiler._pool.submit

    def failing(_work):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(compiler._pool, "submit", failing)
    with pytest.raises(RuntimeError):
        compiler.begin(Regex("a"), ticket=1, done=lambda _: None)
    monkeypatch.setattr(compiler._pool, "submit", submit)
    assert isinstance(compiled(compiler, Regex("a")), Program)
