"""What one answer's grammar lets follow: a mask over the vocabulary for each of its steps.

The engine's thread owns a :class:`Constraint`: it reads the mask when it samples and tells the token it
chose. The next mask is computed meanwhile on the :class:`MaskThread`, beside the model's call, as llguidance
does not hold the interpreter for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from llorch_serve.errors import FieldViolation, InvalidRequestError, LibraryPanicError
from llorch_serve.structured.limits import MOST_OVER_S, STEP_S
from llorch_serve.text.panics import panics_as_errors

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from llorch_serve.structured.vocabulary import Vocabulary

BoolArray = npt.NDArray[np.bool_]
P = ParamSpec("P")
# What Python says where the system has no thread to give, or the process is about to end.
_NO_THREAD: Final = ("can't start new thread", "interpreter shutdown")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Mask:
    """What may follow at one place of an answer.

    text: bool[vocabulary], the tokens that go on.
    accepting: whether the answer may end here.
    """

    text: BoolArray
    accepting: bool


@dataclass(slots=True, eq=False, weakref_slot=True)
class Program:
    """A compiled grammar, from which every answer's constraint is copied.

    field: what the request called it, for errors.
    first: the mask of an answer's first token.
    size: bytes of memory that it takes.
    broken: it has reached a limit, so that the states that it keeps are full, or the library has panicked
        over it.
    """

    matcher: LLMatcher
    vocabulary: Vocabulary
    field: str
    first: Mask
    size: int
    broken: bool = False

    def begin(self, stop_ids: frozenset[int]) -> Constraint:
        """Return the state before the first token. stop_ids: tokens that end this answer."""
        return Constraint(self, stop_ids)


def compute_mask(matcher: LLMatcher, vocabulary: Vocabulary) -> Mask:
    """Return the mask of a matcher's next token; all false and not accepting if it has failed."""
    packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    text = np.unpackbits(packed, count=vocabulary.size, bitorder="little").view(np.bool_)
    text[vocabulary.unwritten] = False
    return Mask(text, matcher.is_accepting())


def explain(matcher: LLMatcher) -> str | None:
    """Return why a matcher failed, in one line; None if it has not."""
    return one_line(matcher.get_error()) if matcher.is_error() else None


def one_line(reason: str) -> str:
    """Return the library's reason without its line breaks and without what it leaves out."""
    if reason.startswith("NoExtension"):
        return "no text satisfies it"
    return " ".join(reason.replace("<non-verbose/>", "").split())[:300]


class Constraint:
    """Follows one answer through its grammar. For one thread, except :meth:`compute`."""

    def __init__(self, program: Program, stop_ids: frozenset[int]) -> None:
        vocabulary = program.vocabulary
        self._program = program
        self._matcher: LLMatcher | None = None  # a copy from the first token on, as many requests may wait
        self._stop_ids = stop_ids
        # A stop token that is ordinary text too is the grammar's to allow, unless it is the model's own.
        closing = [id_ for id_ in stop_ids if id_ in vocabulary.special or id_ in vocabulary.model_stops]
        self._closing = np.array(sorted(closing), dtype=np.int64)
        self._mask: Mask | None = program.first
        self._forbidden: BoolArray | None = None
        self._job: Future[None] | None = None
        self._taken_s = 0.0  # processor time, of a token and beyond
        self._over_s = 0.0
        self.complete = False
        """Whether the grammar is known to let nothing follow, without a look at the mask."""

    def advance(self, token_id: int) -> None:
        """Take note of the token that was chosen."""
        self._mask = self._forbidden = None
        if token_id in self._stop_ids:
            self.complete = True  # the answer ends with it, and the grammar does not know it
            return
        self._over_s += max(self._taken_s - STEP_S, 0.0)
        self._taken_s = 0.0
        self._call(self._consume, token_id)

    def expect(self, job: Future[None]) -> None:
        """Wait for ``job``, which calls :meth:`compute`, when the mask is asked for."""
        self._job = job

    def compute(self) -> None:
        """Compute the next mask; the mask thread, or the engine's where there was nothing to overlap with."""
        assert self._matcher is not None
        self._mask = self._call(compute_mask, self._matcher, self._program.vocabulary)

    @property
    def ended(self) -> bool:
        """Whether the grammar lets nothing follow: the answer is complete."""
        if self.complete:
            return True
        mask = self._current()
        return mask.accepting and not mask.text.any()

    def forbidden(self) -> BoolArray:
        """Return bool[vocabulary], the tokens that must not follow; not to be changed.

        Raises InvalidRequestError if the grammar has become too complex or leads nowhere.
        """
        if self._forbidden is None:
            mask = self._current()
            self._check(mask)
            self._forbidden = ~mask.text
            if mask.accepting:
                self._forbidden[self._closing] = False
        return self._forbidden

    def _current(self) -> Mask:
        if self._job is not None:
            self._job.result()
            self._job = None
        if self._mask is None:
            self.compute()
        assert self._mask is not None
        return self._mask

    def _consume(self, token_id: int) -> None:
        if self._matcher is None:
            self._matcher = self._program.matcher.deep_copy()
        self._matcher.consume_token(token_id)
        self.complete = self._matcher.is_stopped() and not self._matcher.is_error()

    def _call(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Do the library's work, and count its time. Where it panics, LibraryPanicError: it may have left
        anything behind.
        """
        started = time.thread_time()
        try:
            with panics_as_errors("llguidance"):
                return work(*args, **kwargs)
        except LibraryPanicError:
            self._program.broken = True
            raise
        finally:
            self._taken_s += time.thread_time() - started

    def _check(self, mask: Mask) -> None:
        found = None
        over_s = self._over_s + max(self._taken_s - STEP_S, 0.0)
        if not mask.accepting and not mask.text.any():
            reason = None if self._matcher is None else self._call(explain, self._matcher)
            self._program.broken |= reason is not None
            found = (
                "the answer cannot go on: no token of this model is what must follow"
                if reason is None
                else f"the answer cannot go on: {reason}; expected something simpler"
            )
        elif over_s > MOST_OVER_S:
            found = (
                f"its tokens took {over_s:.2g} s beyond {STEP_S:g} s for each, the most is {MOST_OVER_S:g}; "
                "expected something simpler"
            )
        if found is not None:
            raise InvalidRequestError([FieldViolation(self._program.field, found)])


class MaskThread:
    """Computes masks while the model runs: one thread, started when it is first needed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="llorch-mask")
        self._closed = False

    def start(self, constraints: Sequence[Constraint]) -> None:
        """Compute the next mask of each. Whoever asks for one does it where no thread can be had."""
        if self._closed:
            return
        try:
            job = self._pool.submit(_compute_all, constraints)
        except RuntimeError as error:
            if not any(cause in str(error) for cause in _NO_THREAD):
                raise
            # The job stays in the pool's queue, and must not run beside whoever asks.
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="llorch-mask")
            return
        for constraint in constraints:
            constraint.expect(job)

    def close(self) -> None:
        """End the thread; there is none from now on."""
        self._closed = True
        self._pool.shutdown()


def _compute_all(constraints: Sequence[Constraint]) -> None:
    for constraint in constraints:
        # One that fails is computed again when it is asked for, and the error told then to its answer alone.
        with contextlib.suppress(Exception):
            constraint.compute()
