"""From the form that a request asks for to the program that its answers' constraints are made of: compiled
once, beside everything else.

Requests come from the worker on any thread. A grammar that is known gives its program at once; another is
examined in a process of its own and then compiled on this module's thread, and the caller hears of it later.
Clients take turns.

Programs are kept for requests of the same cache salt alone: by the time it takes, a grammar that is known
would tell that somebody has asked for it, and what one answer does to a program's states shows in the others.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

from llorch_serve.errors import (
    FieldViolation,
    InvalidRequestError,
    QueueFullError,
    UnsupportedError,
)
from llorch_serve.structured.constraint import Program, compute_mask, explain, one_line
from llorch_serve.structured.limits import (
    MAX_KEPT,
    MAX_OF_CLIENT,
    MAX_PROGRAM_BYTES,
    MAX_REQUESTS,
    MAX_WAITING,
    parser_limits,
)
from llorch_serve.structured.spec import HeldForm, field_of
from llorch_serve.structured.vocabulary import Vocabulary, build
from llorch_serve.text.panics import panics_as_errors
from llorch_serve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llorch_serve.structured.examiner import Examiner

logger = logging.getLogger(__name__)

Done = Callable[[Program | Exception], None]
"""Takes the program, or why there is none."""

_Key = tuple[str, HeldForm]
"""A cache salt, and a form."""


@dataclass(frozen=True, slots=True)
class _Waiter:
    ticket: Hashable
    done: Done
    tokens: int


class GrammarCompiler:
    """Compiles for one model, and keeps what was used last. Any thread.

    vocab_size: tokens that the model knows.
    model_stops: tokens that end the model's answers.
    most_tokens: tokens that the prompts which wait for their grammars may have together; one may always wait.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        model_stops: frozenset[int],
        *,
        most_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._model_stops = model_stops
        self._most_tokens = most_tokens
        self._vocabulary: Vocabulary | None = None
        self._no_vocabulary: str | None = None  # why there can be none
        self._examiner: Examiner | None = None
        self._kept: OrderedDict[_Key, Program] = OrderedDict()
        self._alive: WeakSet[Program] = WeakSet()  # those that are kept, and those of requests
        self._waiting: dict[_Key, list[_Waiter]] = {}
        # Of each client, in the order of their turns, what is to be compiled.
        self._lines: OrderedDict[str, deque[_Key]] = OrderedDict()
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

    @property
    def available(self) -> bool:
        """Whether forms can be compiled, as far as is known before the first: llguidance is installed, and
        has not failed to read the tokenizer.
        """
        return importlib.util.find_spec("llguidance") is not None and self._no_vocabulary is None

    def begin(
        self,
        form: HeldForm,
        *,
        ticket: Hashable,
        done: Done,
        client: str = "",
        cache_salt: str = "",
        tokens: int = 0,
    ) -> Program | None:
        """Return the program if the grammar is compiled already; else None, and ``done`` is called once.

        ticket: names the caller in :meth:`cancel`. ``done`` is called on the compiling thread and must not
            block.
        client, cache_salt: see :class:`llorch_serve.engine.sequence.Sequence`. tokens: those of the request's
            prompts.
        Raises UnsupportedError without llguidance, or where it cannot read the tokenizer, QueueFullError if
        too many grammars, requests for them or tokens of those wait.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise UnsupportedError(
                "structured output needs llguidance, which is not installed; install it where the worker "
                "runs with: "
                "pip install 'llorch[structured]'"
            )
        if self._no_vocabulary is not None:
            raise UnsupportedError(self._no_vocabulary)
        key = (cache_salt, form)
        with self._lock:
            program = self._kept.get(key)
            if program is not None and not program.broken:
                self._kept.move_to_end(key)
                return program
            self._check_room(key, client, tokens)
            if key not in self._waiting:
                # The job needs the lock to begin. First, as there may be no thread for it.
                self._pool.submit(self._work)
                self._waiting[key] = []
                self._lines.setdefault(client, deque()).append(key)
            self._waiting[key].append(_Waiter(ticket, done, tokens))
        return None

    def _check_room(self, key: _Key, client: str, tokens: int) -> None:
        """Raise QueueFullError where a request must not wait; the lock is held."""
        found = None
        waiters = [waiter for waiters in self._waiting.values() for waiter in waiters]
        waiting_tokens = sum(waiter.tokens for waiter in waiters)
        if len(waiters) >= MAX_REQUESTS:
            found = f"{MAX_REQUESTS} requests wait for their grammars, the most this worker holds"
        elif waiters and waiting_tokens + tokens > self._most_tokens:
            found = (
                f"{waiting_tokens} tokens of prompts wait for their grammars and this request has {tokens}, "
                f"the most this worker holds is {self._most_tokens}"
            )
        elif key not in self._waiting and len(self._waiting) >= MAX_WAITING:
            found = f"{MAX_WAITING} grammars wait to be compiled, the most this worker holds"
        elif key not in self._waiting and len(self._lines.get(client, ())) >= MAX_OF_CLIENT:
            found = (
                f"{MAX_OF_CLIENT} grammars of this client wait to be compiled, the most this worker holds "
                f"of one"
            )
        if found is not None:
            raise QueueFullError(f"{found}; try again", retry_after_s=1.0)

    def cancel(self, ticket: Hashable) -> bool:
        """Forget a caller that waits; its ``done`` is not called. Return whether it was waiting."""
        with self._lock:
            for key, waiters in self._waiting.items():
                left = [waiter for waiter in waiters if waiter.ticket != ticket]
                if len(left) < len(waiters):
                    self._waiting[key] = left
                    return True
        return False

    def close(self) -> None:
        """End thread and process; callers that still wait are not told."""
        with self._lock:
            self._waiting.clear()
            self._lines.clear()
            examiner = self._examiner
        if examiner is not None:
            examiner.close()
        self._pool.shutdown(cancel_futures=True)
        if self._examiner is not None:
            self._examiner.close()  # which a grammar that was under way may have started again

    def _work(self) -> None:
        """Compile the form whose turn it is, and tell who waits for it. The compiling thread."""
        key = self._take()
        if key is None:
            return
        found: Program | Exception
        try:
            with panics_as_errors("llguidance"):
                found = self._compile(*key)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told to those who wait
            found = error
        with self._lock:
            waiters = self._waiting.pop(key, [])
            if isinstance(found, Program):
                self._kept[key] = found
                self._kept.move_to_end(key)
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        for waiter in waiters:
            try:
                with panics_as_errors("a library"):
                    waiter.done(found)
            except Exception:
                logger.exception("a request could not be told of its grammar")

    def _take(self) -> _Key | None:
        """Take the form whose turn it is; None if nobody waits for it any more, as whoever comes now has a
        job of its own.
        """
        with self._lock:
            if not self._lines:
                return None
            client, line = next(iter(self._lines.items()))
            key = line.popleft()
            if line:
                self._lines.move_to_end(client)
            else:
                del self._lines[client]
            if not self._waiting.get(key):
                self._waiting.pop(key, None)
                return None
            return key

    def _compile(self, cache_salt: str, form: HeldForm) -> Program:
        """Return a form's program. Raises InvalidRequestError, UnsupportedError or QueueFullError."""
        from llguidance import LLMatcher

        from llorch_serve.structured.composing import compose
        from llorch_serve.structured.examiner import Examiner
        from llorch_serve.structured.refusals import refused_field

        vocabulary = self._prepared()
        grammar = compose(form, vocabulary.special)
        field = field_of(form)
        with self._lock:
            if self._examiner is None:
                self._examiner = Examiner(vocabulary.size, vocabulary.special)
        reason = self._examiner.refusal(grammar)
        if reason is None:
            size = self._examiner.grammar_bytes + vocabulary.size  # a byte a token for the first mask
            self._make_room((cache_salt, form), size)
            matcher = LLMatcher(vocabulary.trie, grammar, log_level=0, limits=parser_limits())
            program = Program(matcher, vocabulary, field, compute_mask(matcher, vocabulary), size)
            reason = explain(matcher)
            if reason is None:
                self._alive.add(program)
                return program
        field = refused_field(form, reason, vocabulary.special, self._examiner)
        raise InvalidRequestError([FieldViolation(field, f"cannot be used: {one_line(reason)}")])

    def _make_room(self, key: _Key, size: int) -> None:
        """Forget kept programs, the oldest first, until one more of ``size`` bytes fits. Raises
        QueueFullError.
        """
        with self._lock:
            self._kept.pop(key, None)  # broken, or there would be nothing to compile
            while (used := sum(program.size for program in self._alive)) + size > MAX_PROGRAM_BYTES:
                if not self._kept:
                    raise QueueFullError(
                        f"the grammars of requests take {used >> 20} MiB and this one {size >> 20}, the "
                        f"most this worker holds is "
                        f"{MAX_PROGRAM_BYTES >> 20}; try again",
                        retry_after_s=1.0,
                    )
                self._kept.popitem(last=False)

    def _prepared(self) -> Vocabulary:
        with self._preparing:
            if self._no_vocabulary is not None:
                raise UnsupportedError(self._no_vocabulary)
            if self._vocabulary is None:
                try:
                    self._vocabulary = build(self._tokenizer, self._vocab_size, self._model_stops)
                except UnsupportedError as error:
                    self._no_vocabulary = str(error)
                    raise
            return self._vocabulary
