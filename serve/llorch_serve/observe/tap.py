"""A generator with observers: every request passes through unchanged, and what happens to it is told on
another thread.

Input: a generator, and the calls of those who use it. Output: the same updates to the same sinks, and each
request's life to the observers. The engine's thread only notes the time and puts a step's updates into a
queue.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from llorch_serve.calls.interfaces import ClosableGenerator
from llorch_serve.engine.load import Load
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import EngineStoppedError, FieldViolation
from llorch_serve.observe.observer import SCORE, Ending, Observed, Observer, RequestFacts, Tracing
from llorch_serve.requests import (
    Abort,
    AnswerOptions,
    Completion,
    EmbedRequest,
    GenerationRequest,
    GenerationUpdate,
    ModelInfo,
    Prompt,
    RankRequest,
    ScoreRequest,
    UpdateSink,
)
from llorch_serve.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

R = TypeVar("R", GenerationRequest, ScoreRequest, RankRequest, EmbedRequest)


@dataclass(frozen=True, slots=True)
class _Submitted:
    seen: Observed


@dataclass(frozen=True, slots=True)
class _Step:
    at_s: float
    updates: list[GenerationUpdate]


@dataclass(frozen=True, slots=True)
class _Refused:
    seen: Observed
    ending: Ending


_Item = _Submitted | _Step | _Refused | threading.Event | None


class _Tap:
    """A sink in front of another. Called on the engine's thread."""

    __slots__ = ("__weakref__", "_items", "_sink")

    def __init__(self, sink: UpdateSink, items: queue.SimpleQueue[_Item]) -> None:
        self._sink = sink
        self._items = items

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        # Noted first: once the sink has a request's end, another of its id may come.
        self._items.put(_Step(time.perf_counter(), updates))
        self._sink.deliver(updates)


class ObservedGenerator:
    """Implements :class:`llorch_serve.calls.interfaces.ClosableGenerator` around another."""

    def __init__(self, inner: ClosableGenerator, observers: Sequence[Observer]) -> None:
        self._inner = inner
        self._observers = tuple(observers)
        self._tracing = [each for each in self._observers if isinstance(each, Tracing)]
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        # One tap for each sink, so that a step's updates still reach a sink in one call; it lives as long as
        # a request.
        self._taps: weakref.WeakValueDictionary[int, _Tap] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._live: dict[str, Observed] = {}  # the observing thread's own
        self._thread = threading.Thread(target=self._observe, name="llorch-observe", daemon=True)
        self._thread.start()

    @property
    def inner(self) -> ClosableGenerator:
        """The generator that is observed."""
        return self._inner

    def submit(self, request: GenerationRequest, sink: UpdateSink) -> Abort:
        """Pass a request on; see :meth:`llorch_serve.requests.TextGenerator.submit`."""
        return self._pass_in(request, sink, self._inner.submit)

    def submit_score(self, request: ScoreRequest, sink: UpdateSink) -> Abort:
        """Pass a request for scores on; see :meth:`llorch_serve.requests.TextGenerator.submit_score`."""
        return self._pass_in(request, sink, self._inner.submit_score)

    def submit_rank(self, request: RankRequest, sink: UpdateSink) -> Abort:
        """Pass a request for ranks on; see :meth:`llorch_serve.requests.TextGenerator.submit_rank`."""
        return self._pass_in(request, sink, self._inner.submit_rank)

    def submit_embedding(self, request: EmbedRequest, sink: UpdateSink) -> Abort:
        """Pass a request for vectors on; see
        :meth:`llorch_serve.requests.TextGenerator.submit_embedding`.
        """
        return self._pass_in(request, sink, self._inner.submit_embedding)

    def _pass_in(
        self,
        request: R,
        sink: UpdateSink,
        submit: Callable[[R, UpdateSink], Abort],
    ) -> Abort:
        seen = Observed(RequestFacts.of(request), time.perf_counter(), time.time_ns())
        request = self._traced(request, seen)
        with self._lock:
            tap = self._taps.get(id(sink))
            if tap is None:
                tap = self._taps[id(sink)] = _Tap(sink, self._items)
        self._items.put(_Submitted(seen))  # before its first update can come
        try:
            return submit(request, tap)
        except Exception as error:
            self._items.put(_Refused(seen, Ending(time.perf_counter(), error=error)))
            raise

    def _traced(self, request: R, seen: Observed) -> R:
        """Return a request whose traceparent is of the span that is made of it here, if one is."""
        for observer in self._tracing:
            try:
                traceparent = observer.open(seen)
            except Exception:  # as in _observe
                logger.exception("an observer failed")
            else:
                request = replace(request, traceparent=traceparent or request.traceparent)
        return request

    def when_dead(self, tell: Callable[[EngineStoppedError], None]) -> None:
        """Have ``tell`` called if the engine stops after an error."""
        self._inner.when_dead(tell)

    def violations(
        self, prompt: Prompt, sampling: SamplingParams, answers: AnswerOptions
    ) -> list[FieldViolation]:
        """Return every bad field of a prompt and its sampling settings."""
        return self._inner.violations(prompt, sampling, answers)

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt and the text they stand for."""
        return self._inner.tokenize(prompt)

    def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool) -> str:
        """Return the text of token ids."""
        return self._inner.detokenize(token_ids, keep_special_tokens=keep_special_tokens)

    def model_info(self) -> ModelInfo:
        """Describe what is served."""
        return self._inner.model_info()

    def load(self) -> Load:
        """Return how busy the engine is, as of its last step."""
        return self._inner.load()

    def settle(self) -> None:
        """Return once the observers know everything that has happened so far."""
        told = threading.Event()
        self._items.put(told)
        told.wait()

    def close(self) -> None:
        """Close the generator, and the observers once they know how its last requests ended."""
        self._inner.close()
        self._items.put(None)
        self._thread.join()

    def _observe(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                self._tell(item)
            except Exception:  # a request's record is lost; those of the others go on
                logger.exception("an observer failed")
        for observer in self._observers:
            observer.close()

    def _tell(self, item: _Submitted | _Step | _Refused | threading.Event) -> None:
        match item:
            case threading.Event():
                item.set()
            case _Submitted(seen):
                # A second request of a live id is about to be refused; the first one keeps its place.
                if self._live.setdefault(seen.request.request_id, seen) is seen:
                    for observer in self._observers:
                        observer.begun(seen)
            case _Refused(seen, ending):
                if self._live.get(seen.request.request_id) is seen:
                    del self._live[seen.request.request_id]
                for observer in self._observers:
                    observer.ended(seen, ending)
            case _Step(at_s, updates):
                for update in updates:
                    self._pass_on(at_s, update)

    def _pass_on(self, at_s: float, update: GenerationUpdate) -> None:
        seen = self._live.get(update.request_id)
        if seen is None:
            return
        if update.token_ids:
            before = seen.last_by_answer.get(update.index)
            seen.last_by_answer[update.index] = seen.last_s = at_s
            if before is not None or seen.first_s is None:  # later answers have no first token of the request
                seen.first_s = at_s if seen.first_s is None else seen.first_s
                gap = None if before is None else at_s - before
                for observer in self._observers:
                    observer.produced(seen, len(update.token_ids), gap)
        if update.completion is not None:
            seen.completions.append(update.completion)
        if update.score is not None:
            seen.scores.append(update.score)
        if update.is_last:
            del self._live[update.request_id]
            ending = _ending(seen, at_s) if update.error is None else Ending(at_s, error=update.error)
            ending = replace(ending, replicas=update.replicas)
            for observer in self._observers:
                observer.ended(seen, ending)


def _ending(seen: Observed, at_s: float) -> Ending:
    """Return how a request ended that no error has ended."""
    completion = _together(seen.completions)
    if seen.request.operation != SCORE:
        return Ending(at_s, completion)
    if len(seen.scores) < seen.request.continuations:
        return Ending(at_s, replace(completion, reason=FinishReason.CANCELLED))
    # Each context is told with each of its continuations.
    contexts = sum(score.context_tokens for score in seen.scores) * seen.request.contexts
    tokens = contexts // len(seen.scores) + sum(score.token_count for score in seen.scores)
    return Ending(at_s, replace(completion, prompt_tokens=tokens), scored=True)


def _together(completions: list[Completion]) -> Completion:
    """Return one completion for a request of several answers."""
    return replace(
        completions[0],
        prompt_tokens=sum(c.prompt_tokens for c in completions),
        generated_tokens=sum(c.generated_tokens for c in completions),
        cached_tokens=sum(c.cached_tokens for c in completions),
        drafted_tokens=sum(c.drafted_tokens for c in completions),
        accepted_tokens=sum(c.accepted_tokens for c in completions),
    )
