"""From the form that a request asks for to the program that its answers' constraints are made of: compiled once, beside everything else.

Requests come from the worker on any thread. A grammar that is known gives its program at once; another is
examined in a process of its own and then compiled on this module's thread, and the caller hears of it later.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

from llorch_serve.errors import (
    FieldViolation,
    InvalidRequestError,
    LlorchError,
    QueueFullError,
    UnsupportedError,
)
from llorch_serve.structured.constraint import Program, compute_mask, explain, one_line
from llorch_serve.structured.examiner import Examiner
from llorch_serve.structured.limits import MAX_KEPT, MAX_REQUESTS, MAX_WAITING, parser_limits
from llorch_serve.structured.spec import Structured
from llorch_serve.structured.translate import translate
from llorch_serve.structured.vocabulary import Vocabulary, build
from llorch_serve.text import Tokenizer

Done = Callable[[Program | Exception], None]
"""Takes the program, or why there is none."""


@dataclass(frozen=True, slots=True)
class _Waiter:
    ticket: Hashable
    done: Done


class GrammarCompiler:
    """Compiles for one model, and keeps what was used last. Any thread.

    vocab_size: tokens that the model knows.
    model_stops: tokens that end the model's answers.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, model_stops: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._model_stops = model_stops
        self._vocabulary: Vocabulary | None = None
        self._examiner: Examiner | None = None
        self._kept: OrderedDict[Structured, Program] = OrderedDict()
        self._waiting: dict[Structured, list[_Waiter]] = {}
        self._lock = threading.Lock()
        self._preparing = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="llorch-grammar")

    def prepare(self) -> None:
        """Make ready what all grammars need, which later would stop every thread for a second.

        Does nothing where llguidance is missing or cannot read the tokenizer: requests are told so.
        """
        if importlib.util.find_spec("llguidance") is not None:
            try:
                self._prepared()
            except UnsupportedError:
                return

    def begin(self, form: Structured, *, ticket: Hashable, done: Done) -> Program | None:
        """Return the program if the grammar is compiled already; else None, and ``done`` is called once.

        ticket: names the caller in :meth:`cancel`. ``done`` is called on the compiling thread and must not block.
        Raises UnsupportedError without llguidance, QueueFullError if too many grammars, or requests for them, wait.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise UnsupportedError(
                "structured output needs llguidance, which is not installed; install it where the worker runs with: "
                "pip install 'llorch[structured]'"
            )
        with self._lock:
            program = self._kept.get(form)
            if program is not None and not program.broken:
                self._kept.move_to_end(form)
                return program
            if sum(map(len, self._waiting.values())) >= MAX_REQUESTS:
                raise QueueFullError(
                    f"{MAX_REQUESTS} requests wait for their grammars, the most this worker holds; try again",
                    retry_after_s=1.0,
                )
            waiter = _Waiter(ticket, done)
            if form in self._waiting:
                self._waiting[form].append(waiter)
                return None
            if len(self._waiting) >= MAX_WAITING:
                raise QueueFullError(
                    f"{MAX_WAITING} grammars wait to be compiled, the most this worker holds; try again",
                    retry_after_s=1.0,
                )
            self._waiting[form] = [waiter]
            job = self._pool.submit(self._compile, form)
            # Inside the lock, which the job needs to begin: a job that had ended would call back on this very thread.
            job.add_done_callback(functools.partial(self._deliver, form))
        return None

    def cancel(self, ticket: Hashable) -> bool:
        """Forget a caller that waits; its ``done`` is not called. Return whether it was waiting."""
        with self._lock:
            for form, waiters in self._waiting.items():
                left = [waiter for waiter in waiters if waiter.ticket != ticket]
                if len(left) < len(waiters):
                    self._waiting[form] = left
                    return True
        return False

    def close(self) -> None:
        """End thread and process; callers that still wait are not told."""
        with self._lock:
            self._waiting.clear()
            examiner = self._examiner
        if examiner is not None:
            examiner.close()
        self._pool.shutdown(cancel_futures=True)
        if self._examiner is not None:
            self._examiner.close()  # which a grammar that was under way may have started again

    def _compile(self, form: Structured) -> Program | None:
        """Return the program; None if nobody waits for it any more."""
        with self._lock:
            if not self._waiting.get(form):
                self._waiting.pop(form, None)
                return None
        from llguidance import LLMatcher

        vocabulary = self._prepared()
        grammar = translate(form)
        field = f"sampling.{form.field}"
        with self._lock:
            if self._examiner is None:
                self._examiner = Examiner(vocabulary.size, vocabulary.special)
        reason = self._examiner.refusal(grammar)
        if reason is None:
            matcher = LLMatcher(vocabulary.trie, grammar, log_level=0, limits=parser_limits())
            program = Program(matcher, vocabulary, field, compute_mask(matcher, vocabulary))
            if not matcher.is_error():
                return program
            reason = explain(matcher)
        raise InvalidRequestError([FieldViolation(field, f"cannot be used: {one_line(reason)}")])

    def _deliver(self, form: Structured, job: Future[Program | None]) -> None:
        error: BaseException | None
        try:
            error, program = job.exception(), None
        except CancelledError:
            return
        if error is None and (program := job.result()) is None:
            return  # whoever comes now has a job of its own
        with self._lock:
            waiters = self._waiting.pop(form, [])
            if program is not None:
                self._kept[form] = program
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        if error is not None and not isinstance(error, Exception):  # how a panic of the library arrives here
            error = LlorchError(f"compiling a grammar failed: {type(error).__name__}: {error}")
        for waiter in waiters:
            if error is not None:
                waiter.done(error)
            elif program is not None:
                waiter.done(program)

    def _prepared(self) -> Vocabulary:
        with self._preparing:
            if self._vocabulary is None:
                self._vocabulary = build(self._tokenizer, self._vocab_size, self._model_stops)
            return self._vocabulary
