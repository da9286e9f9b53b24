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
from collections.abc import Sequence as Seq

from llorch_serve.engine.lanes import LaneEngine, Lanes
from llorch_serve.engine.sequence import FinishReason, Sequence, TokenEvent
from llorch_serve.errors import EngineStoppedError, UnavailableError, duplicate_id
from llorch_serve.requests import Abort, GenerationUpdate, UpdateSink
from llorch_serve.structured.compiler import GrammarCompiler
from llorch_serve.structured.constraint import Program
from llorch_serve.structured.spec import HeldForm
from llorch_serve.worker.jobs import Job

logger = logging.getLogger(__name__)


class LiveRequests:
    """All requests of one worker that have not ended, and the loop that runs them. From any thread.

    engines: run them, each of them a lane of the model. grammars: compiles what answers are held to; None: no
        request has a form.
    """

    def __init__(self, engines: Seq[LaneEngine], grammars: GrammarCompiler | None) -> None:
        self._grammars = grammars
        self._live: dict[str, Job] = {}  # by the request's id
        self._lock = threading.Lock()
        self._failure: EngineStoppedError | None = None
        self._death_listeners: list[Callable[[EngineStoppedError], None]] = []
        self._closed = False
        self._loop = Lanes(engines, self._on_events, self._on_death)
        self._loop.start()

    def close(self) -> bool:
        """Cancel what is live and stop the loop. Return whether it was this call that did."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            waiting = [job for job in self._live.values() if self._cancel_grammar(job)]
        for job in waiting:
            self._end_unseen(job, None)
        self._loop.stop()
        return True

    def when_dead(self, tell: Callable[[EngineStoppedError], None]) -> None:
        """Have ``tell`` called on the engine's thread if the engine stops after an error; at once if it
        has.
        """
        with self._lock:
            self._death_listeners.append(tell)
            failure = self._failure
        if failure is not None:
            tell(failure)

    def die(self, error: BaseException) -> None:
        """End every request because what runs the model is gone. Any thread; once."""
        self._loop.die(error)

    def check_open(self) -> None:
        """Raise UnavailableError once nothing is answered any more."""
        if self._failure is not None:
            raise UnavailableError(f"the engine has stopped; {self._failure}")
        if self._closed:
            raise UnavailableError("the worker is shutting down")

    def enter(self, job: Job, form: HeldForm | None = None) -> Abort:
        """Make a request live and hand its sequences to the loop, once its form's grammar is compiled; return
        what ends it.

        Raises InvalidRequestError, UnsupportedError or UnavailableError.
        """
        with self._lock:
            self.check_open()
            if job.request_id in self._live:
                raise duplicate_id(job.request_id)
            grammar = None
            if form is not None:
                assert self._grammars is not None, "requests with forms come to workers that know them"
                sequence = job.sequences[0]
                grammar = self._grammars.begin(
                    form,
                    ticket=job,
                    done=lambda found: self._on_grammar(job, found),
                    client=sequence.ownership.client,
                    cache_salt=sequence.ownership.cache_salt,
                    tokens=sum(each.prompt_length for each in job.sequences),
                )
                if grammar is not None:
                    _hold(job, grammar)
            self._live[job.request_id] = job
            # Inside the lock, so that no close or abort gets to the engine before what it is to end.
            if form is None or grammar is not None:
                self._hand_over(job)
        return functools.partial(self._abort, job)

    def _cancel_grammar(self, job: Job) -> bool:
        """Give up a request's grammar; tell whether the request has waited for it."""
        return self._grammars is not None and self._grammars.cancel(job)

    def _abort(self, job: Job) -> None:
        """End a request if it is live; its last update has reason CANCELLED. Idempotent."""
        with self._lock:
            if self._live.get(job.request_id) is not job:
                return
            job.aborted = True
            waiting = self._cancel_grammar(job)
        if waiting:
            self._end_unseen(job, None)
            return
        for sequence in job.sequences:
            self._loop.abort(sequence)

    def _on_grammar(self, job: Job, found: Program | Exception) -> None:
        """Queue a request whose grammar is compiled, or end it. The compiling thread."""
        try:
            if isinstance(found, Exception):
                raise found
            _hold(job, found)
        except Exception as error:  # noqa: BLE001 - the grammar's or ours, it is told to who waits for it
            self._end_unseen(job, error)
            return
        with self._lock:
            live = self._live.get(job.request_id) is job
            wanted = live and not (self._closed or job.aborted)
            if wanted:
                self._hand_over(job)
        if not wanted:
            self._end_unseen(job, None)

    def _hand_over(self, job: Job) -> None:
        """Give a request's sequences to the loop."""
        self._loop.add(*job.sequences)

    def _end_unseen(self, job: Job, error: Exception | None) -> None:
        """End a request that has not got to the engine: with an error, or cancelled. Idempotent; any
        thread.
        """
        with self._lock:  # at once, since the engine may die meanwhile and end every request itself
            if self._live.get(job.request_id) is not job:
                return
            del self._live[job.request_id]
        if error is not None:
            job.sink.deliver([GenerationUpdate(job.request_id, "", (), error=error)])
            return
        updates: list[GenerationUpdate] = []
        for sequence in job.sequences:
            updates += job.take(TokenEvent(sequence, None, FinishReason.CANCELLED))[0]
            if job.open == 0:
                break
        job.sink.deliver(updates)

    def _on_events(self, events: list[TokenEvent]) -> list[Sequence]:
        """Turn a step's events into updates, one delivery a sink.

        Returns the sequences to be aborted if they are live: those that a stop string has ended, and those of
        a request that has ended or failed.
        """
        by_sink: dict[int, tuple[UpdateSink, list[GenerationUpdate]]] = {}
        aborted: list[Sequence] = []
        for event in events:
            job = self._live.get(event.sequence.request_id)
            if job is None:
                continue
            told, stopped = job.take(event)
            if stopped:
                aborted.append(event.sequence)
            if job.open == 0:
                with self._lock:
                    del self._live[job.request_id]
                aborted += job.sequences  # where it failed, others of it go on
            if told:
                by_sink.setdefault(id(job.sink), (job.sink, []))[1].extend(told)
        for sink, updates in by_sink.values():
            sink.deliver(updates)
        return aborted

    def _on_death(self, error: BaseException) -> None:
        """Log the error, tell every caller and who watches that the engine is gone; nothing is answered after
        this.
        """
        failure = EngineStoppedError(secrets.token_hex(4))
        logger.error("the engine stopped, error id %s", failure.error_id, exc_info=error)
        with self._lock:
            self._failure = failure
            live, self._live = list(self._live.values()), {}
            for job in live:
                self._cancel_grammar(job)  # one that is still compiled has nobody left to be handed to
            listeners = list(self._death_listeners)
        for tell in listeners:
            tell(failure)
        for job in live:
            job.sink.deliver([GenerationUpdate(job.request_id, "", (), error=failure)])


def _hold(job: Job, grammar: Program) -> None:
    """Hold every answer to a grammar, from its beginning."""
    for sequence in job.sequences:
        assert sequence.sampling is not None
        sequence.sampling.hold_to(grammar.begin(sequence.limits.stop_ids))
