"""Requests from their submission to their last update: to the engine, once their grammar is there, and its
tokens to their sinks.

The worker hands over what its intake has made. Detokenising and stop strings run on the engine's thread
between steps, so an answer ends at its stop string exactly.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
from collections.abc import Callable

from llorch_serve.engine.engine import Engine
from llorch_serve.engine.loop import EngineLoop
from llorch_serve.engine.sequence import FinishReason, Sequence, SequenceStatus, TokenEvent
from llorch_serve.errors import (
    EngineStoppedError,
    FieldViolation,
    InvalidRequestError,
    UnavailableError,
)
from llorch_serve.requests import Abort, GenerationUpdate, UpdateSink
from llorch_serve.sampling.sampler import SamplingRow
from llorch_serve.structured.compiler import GrammarCompiler
from llorch_serve.structured.constraint import Program
from llorch_serve.structured.spec import Structured
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.answers import Answer, Answers

logger = logging.getLogger(__name__)


class LiveRequests:
    """All requests of one worker that have not ended, and the loop that runs them. From any thread."""

    def __init__(self, engine: Engine, grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._live: dict[Sequence, tuple[Answers, Answer]] = {}
        self._by_id: dict[str, Answers] = {}
        self._lock = threading.Lock()
        self._failure: EngineStoppedError | None = None
        self._mourners: list[Callable[[EngineStoppedError], None]] = []
        self._closed = False
        self._loop = EngineLoop(engine, self._on_events, self._on_death)
        self._loop.start()

    def close(self) -> bool:
        """Cancel what is live and stop the loop. Return whether it was this call that did."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            waiting = [answers for answers in self._by_id.values() if self._grammars.cancel(answers)]
        for answers in waiting:
            self._end_unseen(answers, None)
        self._loop.stop()
        return True

    def when_dead(self, tell: Callable[[EngineStoppedError], None]) -> None:
        """Have ``tell`` called on the engine's thread if the engine stops after an error; at once if it
        has.
        """
        with self._lock:
            self._mourners.append(tell)
            failure = self._failure
        if failure is not None:
            tell(failure)

    def check_open(self) -> None:
        """Raise UnavailableError once nothing is answered any more."""
        if self._failure is not None:
            raise UnavailableError(f"the engine has stopped; {self._failure}")
        if self._closed:
            raise UnavailableError("the worker is shutting down")

    def enter(self, answers: Answers, rows: list[SamplingRow], form: Structured | None = None) -> Abort:
        """Make a request live and hand its sequences to the loop, once its form's grammar is compiled; return
        what ends it.

        Raises InvalidRequestError, UnsupportedError or UnavailableError.
        """
        with self._lock:
            self.check_open()
            if answers.request_id in self._by_id:
                found = f"found {answers.request_id!r}, which a live request already has; expected a new one"
                raise InvalidRequestError([FieldViolation("request_id", found)])
            grammar = None
            if form is not None:
                sequence = answers.sequences[0]
                grammar = self._grammars.begin(
                    form,
                    ticket=answers,
                    done=lambda found: self._on_grammar(answers, rows, found),
                    client=sequence.client,
                    cache_salt=sequence.cache_salt,
                    tokens=sum(each.prompt_length for each in answers.sequences),
                )
                if grammar is not None:
                    _hold(answers, rows, grammar)
            self._live.update((answer.sequence, (answers, answer)) for answer in answers.members)
            self._by_id[answers.request_id] = answers
            # Inside the lock, so that no close or abort gets to the engine before what it is to end.
            if form is None or grammar is not None:
                self._hand_over(answers, rows)
        return functools.partial(self._abort, answers)

    def _abort(self, answers: Answers) -> None:
        """End a request if it is live; its last update has reason CANCELLED. Idempotent."""
        with self._lock:
            if self._by_id.get(answers.request_id) is not answers:
                return
            answers.aborted = True
            waiting = self._grammars.cancel(answers)
        if waiting:
            self._end_unseen(answers, None)
            return
        for sequence in answers.sequences:
            self._loop.abort(sequence)

    def _on_grammar(self, answers: Answers, rows: list[SamplingRow], found: Program | Exception) -> None:
        """Queue a request whose grammar is compiled, or end it. The compiling thread."""
        try:
            if isinstance(found, Exception):
                raise found
            _hold(answers, rows, found)
        except Exception as error:  # noqa: BLE001 - the grammar's or ours, it is told to who waits for it
            self._end_unseen(answers, error)
            return
        with self._lock:
            live = self._by_id.get(answers.request_id) is answers
            wanted = live and not (self._closed or answers.aborted)
            if wanted:
                self._hand_over(answers, rows)
        if not wanted:
            self._end_unseen(answers, None)

    def _hand_over(self, answers: Answers, rows: list[SamplingRow]) -> None:
        """Give a request's sequences to the loop."""
        self._loop.add(*zip(answers.sequences, rows, strict=True))

    def _end_unseen(self, answers: Answers, error: Exception | None) -> None:
        """End a request that has not got to the engine: with an error, or cancelled. Idempotent; any
        thread.
        """
        with self._lock:  # at once, since the engine may die meanwhile and end every request itself
            if self._by_id.get(answers.request_id) is not answers:
                return
            self._forget(answers)
        if error is not None:
            answers.sink.deliver([GenerationUpdate(answers.request_id, "", (), error=error)])
            return
        updates: list[GenerationUpdate] = []
        for answer in answers.members:
            event = TokenEvent(answer.sequence, None, FinishReason.CANCELLED)
            update, _ = self._translate_alone(answer, event)
            updates += answers.take(update)
            if update.error is not None:
                break
        answers.sink.deliver(updates)

    def _on_events(self, events: list[TokenEvent]) -> list[Sequence]:
        """Turn a step's events into updates, one delivery a sink; return what a stop string has ended."""
        by_sink: dict[int, tuple[UpdateSink, list[GenerationUpdate]]] = {}
        ended_early = []
        for event in events:
            live = self._live.get(event.sequence)
            if live is None:
                continue
            answers, answer = live
            update, stopped = self._translate_alone(answer, event)
            if stopped and event.finish is None:
                ended_early.append(event.sequence)
            told = answers.take(update)
            if answers.open == 0 or update.error is not None:
                ended_early += self._end(answers)
            elif update.completion is not None:
                with self._lock:
                    del self._live[event.sequence]
            if told:
                by_sink.setdefault(id(answers.sink), (answers.sink, []))[1].extend(told)
        for sink, updates in by_sink.values():
            sink.deliver(updates)
        return ended_early

    def _end(self, answers: Answers) -> list[Sequence]:
        """Forget a request; return those of its sequences that have not ended, since another one's error ends
        all.
        """
        with self._lock:
            self._forget(answers)
        return [s for s in answers.sequences if s.status is not SequenceStatus.FINISHED]

    def _forget(self, answers: Answers) -> None:
        """Forget a request; the lock is held."""
        del self._by_id[answers.request_id]
        for sequence in answers.sequences:
            self._live.pop(sequence, None)

    def _translate_alone(self, answer: Answer, event: TokenEvent) -> tuple[GenerationUpdate, bool]:
        """Return what :meth:`Answer.translate` does; what fails there ends this request and no other."""
        try:
            return answer.translate(event, self._tokenizer)
        except Exception as error:  # noqa: BLE001 - tokenizer or memory: told to the caller, and logged there
            return GenerationUpdate(answer.request_id, "", (), error=error, index=answer.index), False

    def _on_death(self, error: BaseException) -> None:
        """Log the error, tell every caller and who watches that the engine is gone; nothing is answered after
        this.
        """
        failure = EngineStoppedError(secrets.token_hex(4))
        logger.error("the engine stopped, error id %s", failure.error_id, exc_info=error)
        with self._lock:
            self._failure = failure
            live, self._live, self._by_id = list(self._by_id.values()), {}, {}
            for answers in live:
                self._grammars.cancel(answers)  # one that is still compiled has nobody left to be handed to
            mourners = list(self._mourners)
        for tell in mourners:
            tell(failure)
        for answers in live:
            answers.sink.deliver([GenerationUpdate(answers.request_id, "", (), error=failure)])


def _hold(answers: Answers, rows: list[SamplingRow], grammar: Program) -> None:
    """Hold every answer to a grammar, from its beginning."""
    for sequence, row in zip(answers.sequences, rows, strict=True):
        row.constraint = grammar.begin(sequence.stop_ids)
