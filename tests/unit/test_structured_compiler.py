"""Compiling beside everything else: once for each form, bounded, cancellable, and told to all who wait."""

from __future__ import annotations

import queue
import sys
import threading

import pytest

from checkpoints import EOS_ID, tiny_tokenizer_json
from llorch_serve.errors import LlorchError, QueueFullError, UnsupportedError
from llorch_serve.structured import compiler as compiler_module
from llorch_serve.structured.compiler import GrammarCompiler
from llorch_serve.structured.constraint import Program
from llorch_serve.structured.examiner import Examiner
from llorch_serve.structured.spec import Choice, Regex
from llorch_serve.text import Tokenizer
from structured_walk import PATIENCE_S, allowed, compiled, constrained

pytest.importorskip("llguidance")

TOKENIZER = Tokenizer.from_json(tiny_tokenizer_json().encode(), origin="tiny")
STOPS = frozenset((EOS_ID,))


@pytest.fixture
def compiler():
    made = GrammarCompiler(TOKENIZER, 512, STOPS)
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
    made = GrammarCompiler(odd, 1, frozenset())
    try:
        made.prepare()
        error = compiled(made, Choice(("a",)))
        assert isinstance(error, UnsupportedError)
        assert "tokenizer.json" in str(error)
    finally:
        made.close()


def test_a_panic_is_told_as_an_error(compiler, monkeypatch):
    class Panic(BaseException):
        pass

    def refusal(_self, _grammar):
        raise Panic("boom")

    monkeypatch.setattr(Examiner, "refusal", refusal)
    error = compiled(compiler, Regex("a"))
    assert isinstance(error, LlorchError)
    assert "boom" in str(error)
