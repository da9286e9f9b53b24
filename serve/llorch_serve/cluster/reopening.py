"""A front's generator whose model may be replaced while it serves.

Input: requests of the fronts, and the generator of another model once one is open. Output: what the generator
of the current model answers. What runs when the model is replaced ends where it began; what no replica has
taken by then is submitted anew.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from llorch_serve.cluster.routed_generator import RoutedGenerator
from llorch_serve.cluster.totals import Totals, together
from llorch_serve.engine.load import Load
from llorch_serve.errors import (
    EngineStoppedError,
    FieldViolation,
    ModelMismatchError,
    UnavailableError,
    duplicate_id,
)
from llorch_serve.requests import (
    Abort,
    AnswerOptions,
    EmbedRequest,
    GenerationRequest,
    ModelInfo,
    Prompt,
    RankRequest,
    ScoreRequest,
    UpdateSink,
)
from llorch_serve.sampling.params import SamplingParams

RETIRE_LOOK_S: Final = 0.2
"""Between two looks at whether what a replaced model still answers has ended."""

logger = logging.getLogger(__name__)


class ReopenableGenerator:
    """Implements :class:`llorch_serve.calls.interfaces.ClosableGenerator` by one generator after the other.
    All methods may be called from any thread.

    generator: the first one; it and those that follow are closed with this one.
    """

    def __init__(self, generator: RoutedGenerator) -> None:
        self._current = generator
        self._retired: list[RoutedGenerator] = []
        # One for each model ever served: replicas of one that is deployed again may be those of before.
        self._tallies = {generator.tally.fingerprint: generator.tally}
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listeners: list[Callable[[bool], None]] = []
        self._listen(generator)

    @property
    def current(self) -> RoutedGenerator:
        """What answers new requests."""
        return self._current

    @property
    def is_closed(self) -> bool:
        """Whether nothing is answered any more."""
        return self._closing.is_set()

    def replace(self, generator: RoutedGenerator) -> None:
        """Have another generator answer from now on. Raises UnavailableError once this one is closed; the
        other is closed then.
        """
        with self._lock:
            closed, before = self._closing.is_set(), self._current
            if not closed:
                counted = self._tallies.setdefault(generator.tally.fingerprint, generator.tally)
                generator.count_by(counted)
                self._retired.append(before)
                self._current = generator
                retiring = threading.Thread(
                    target=self._retire, args=(before,), name="llorch-retire", daemon=True
                )
                self._threads = [each for each in self._threads if each.is_alive()] + [retiring]
                retiring.start()
        if closed:
            generator.close()
            raise UnavailableError("the front is shutting down")
        before.retire()
        self._tell(generator, True)
        self._listen(generator)

    def submit(self, request: GenerationRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and send a request; return what ends it early. Raises InvalidRequestError,
        ModelMismatchError where its fingerprint is another model's, or UnavailableError.
        """
        return self._submit(request.request_id, lambda current: current.submit(request, sink))

    def submit_score(self, request: ScoreRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and send a request for scores; see :meth:`submit`."""
        return self._submit(request.request_id, lambda current: current.submit_score(request, sink))

    def submit_rank(self, request: RankRequest, sink: UpdateSink) -> Abort:
        """Check and send a request for ranks; see :meth:`submit`."""
        return self._submit(request.request_id, lambda current: current.submit_rank(request, sink))

    def submit_embedding(self, request: EmbedRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and send a request for vectors; see :meth:`submit`."""
        return self._submit(request.request_id, lambda current: current.submit_embedding(request, sink))

    def violations(
        self, prompt: Prompt, sampling: SamplingParams, answers: AnswerOptions
    ) -> list[FieldViolation]:
        """Return every bad field of a prompt and its options, as :meth:`submit` would name them."""
        return self._current.violations(prompt, sampling, answers)

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt and the text they stand for. Raises InvalidRequestError."""
        return self._current.tokenize(prompt)

    def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool) -> str:
        """Return the text of token ids. Raises InvalidRequestError for ids outside the vocabulary."""
        return self._current.detokenize(token_ids, keep_special_tokens=keep_special_tokens)

    def model_info(self) -> ModelInfo:
        """Describe what is served now."""
        return self._current.model_info()

    def load(self) -> Load:
        """Return how busy the replicas are together, as of the last look at them."""
        return self.totals().load

    def totals(self) -> Totals:
        """Return what the replicas are together and each alone: those of a replaced model too, as long as
        they answer what they have. What has been counted stays counted.
        """
        with self._lock:
            tallies = tuple(self._tallies.values())
        return together([each.totals for each in tallies])

    def when_dead(self, tell: Callable[[EngineStoppedError], None]) -> None:
        """Nothing of this process stops: a replica whose engine does is replaced, and the front goes on."""

    def when_answerable(self, tell: Callable[[bool], None]) -> None:
        """Have ``tell`` called whenever the last replica of the current model has gone or a first one has
        come.
        """
        self._listeners.append(tell)

    def abort_everywhere(self, request_ids: Sequence[str], owner: str) -> tuple[str, ...]:
        """End a caller's live requests, whatever front they came by; return the ids of those that were live.
        Blocks; not for an event loop.
        """
        return self._current.abort_everywhere(request_ids, owner)

    def close(self) -> None:
        """End what still runs here; the replicas go on."""
        with self._lock:
            self._closing.set()
        for thread in self._threads:
            thread.join()
        for each in (*self._retired, self._current):
            each.close()

    def _submit(self, request_id: str, submit: Callable[[RoutedGenerator], Abort]) -> Abort:
        while True:
            current = self._current
            if any(each.is_live(request_id) for each in tuple(self._retired)):
                raise duplicate_id(request_id)
            try:
                return submit(current)
            except UnavailableError:
                if current is self._current:
                    raise  # else it was replaced, and closed, a moment ago

    def _listen(self, generator: RoutedGenerator) -> None:
        generator.when_answerable(lambda answerable: self._tell(generator, answerable))

    def _tell(self, generator: RoutedGenerator, answerable: bool) -> None:
        with self._telling:  # else what is told last may be of the model that has been replaced
            if generator is not self._current:
                return
            for tell in tuple(self._listeners):
                tell(answerable)

    def _retire(self, before: RoutedGenerator) -> None:
        """Let a replaced model end what it answers; move what no replica of it has taken."""
        while not self._closing.is_set():
            served, names = self._current.model_info().fingerprint, set(self.model_info().names)
            for call in before.withdraw():
                try:
                    if names.issuperset(before.model_info().names):
                        call.move(self)
                    else:  # it may have been asked for by a name that is gone
                        call.fail(
                            ModelMismatchError(
                                f"the model was replaced by {served!r}, which has not all of its names, "
                                "while this request waited for a replica; ask for one of the names that are "
                                "served"
                            )
                        )
                except Exception:  # the front's own loop may have ended; the others are still to be told
                    logger.exception("the end of a request could not be told")
            if before.close_if_idle():
                break
            self._closing.wait(RETIRE_LOOK_S)
        else:
            return
        with self._lock:
            self._retired.remove(before)
            if all(each.tally is not before.tally for each in (*self._retired, self._current)):
                before.tally.look(())  # what it has counted stays
        logger.info("all answers of the replaced model %s have ended", before.model_info().fingerprint)
