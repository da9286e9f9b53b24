"""One request on its way through a replica: what its caller has been told, and how it ends if nothing more
comes.

``routed_generator.py`` runs it. Used on that generator's event loop, but for :meth:`RoutedCall.abort`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from llorch_serve.cluster.interfaces import CallKind, Probe, RoutingHint
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import LlorchError, LoggedError
from llorch_serve.requests import (
    Abort,
    Completion,
    GenerationUpdate,
    TextGenerator,
    Timings,
    UpdateSink,
)
from llorch_serve.worker.answers import answer_seed

_NO_TIME = Timings(0.0, 0.0, 0.0)


GoOn: TypeAlias = Callable[[tuple[tuple[int, ...] | None, ...]], bytes]
"""Returns the request that goes on from an answer so far, see
:class:`llorch_serve.requests.EncodedPrompt`.
"""

Again: TypeAlias = Callable[[TextGenerator, UpdateSink], Abort]
"""Submits the request as it came to another generator."""

logger = logging.getLogger(__name__)


class RoutedCall:
    """A request that has been taken.

    answers: how many updates with a completion it ends with.
    seed, prompt_tokens: of a request for generated text.
    again: submits it anew where its model is replaced before it has begun.
    go_on: makes the request that another replica goes on with; None: no other can, once anything is told.
    begun: whether its caller has been told anything. ended: whether the last update has been delivered.
    """

    def __init__(
        self,
        kind: CallKind,
        raw: bytes,
        hint: RoutingHint,
        sink: UpdateSink,
        *,
        answers: int,
        again: Again,
        seed: int = 0,
        prompt_tokens: int = 0,
        go_on: GoOn | None = None,
    ) -> None:
        self.kind = kind
        self.raw = raw
        self.hint = replace(hint, on_sent=self._on_sent, on_taken=self._on_taken, is_over=lambda: self.ended)
        self.begun = False
        self.ended = False
        self.task: asyncio.Task[None] | None = None
        self._sink = sink
        self._seed = seed
        self._prompt_tokens = prompt_tokens
        self._again: Again | None = again
        self._moved: Abort | None = None  # ends it where it has gone
        self._go_on = go_on
        self._told: list[list[int] | None] = [[] for _ in range(answers)]  # tokens; None: it has ended
        self._sent_to: str | None = None
        self._taken: str | None = None
        self._had_by: list[str] = []  # names of replicas, in the order in which they have had it
        self._unwanted = False

    def _on_sent(self, replica: str, _probe: Probe) -> None:
        """Take note of the replica that is to have the request. Any thread."""
        self._sent_to = replica

    def _on_taken(self, replica: str) -> None:
        """Take note of the replica that has the request. Any thread."""
        self._taken = replica
        self._had_by.append(replica)

    def go_elsewhere(self) -> bool:
        """Be another replica's request, behind what has been told of it; tell whether it can be."""
        if self.begun:
            if self._go_on is None:
                return False
            self.raw = self._go_on(tuple(None if ids is None else tuple(ids) for ids in self._told))
        if self._sent_to is not None:
            self.hint = replace(self.hint, avoid=self.hint.avoid | {self._sent_to})
        self._sent_to = self._taken = None
        return True

    @property
    def request_id(self) -> str:
        """The request's id, as the caller knows it."""
        return self.hint.request_id

    @property
    def is_taken(self) -> bool:
        """Whether a replica has it."""
        return self._taken is not None

    @property
    def unwanted(self) -> bool:
        """Whether the caller has ended it."""
        return self._unwanted

    @property
    def told(self) -> int:
        """How many tokens have been told, and ends of answers."""
        return sum(1 if ids is None else len(ids) for ids in self._told)

    def abort(self) -> None:
        """Note that nobody wants it, and end it where it has moved to. Any thread: the loop that it began on
        may have ended. :meth:`cancel` follows.
        """
        self._unwanted = True
        if self._moved is not None:
            self._moved()

    def cancel(self) -> None:
        """End it early: now, or as soon as it would begin."""
        self._unwanted = True
        if self.task is not None:
            self.task.cancel()

    def withdraw(self) -> None:
        """End it here, and tell its caller nothing: :meth:`move` follows."""
        self.ended = True
        if self.task is not None:
            self.task.cancel()

    def move(self, generator: TextGenerator) -> None:
        """Have another generator answer it, once it has been withdrawn. Any thread but the loop's."""
        again, self._again = self._again, None
        assert again is not None
        try:
            self._moved = again(generator, self._sink)
        except LlorchError as error:
            self.fail(error)
        except Exception:  # nobody else would tell its caller
            error_id = secrets.token_hex(4)
            logger.exception("a waiting request could not be submitted anew, error id %s", error_id)
            self.fail(LoggedError(error_id))
        else:
            if self._unwanted:
                self._moved()

    def deliver(self, updates: Sequence[GenerationUpdate]) -> None:
        """Pass updates on to the caller."""
        for update in updates:
            told = self._told[update.index] if update.index < len(self._told) else None
            if update.completion is not None:
                self._told[update.index : update.index + 1] = [None]
            elif told is not None:
                told += update.token_ids
        self.begun, self._again = True, None
        if self._go_on is None:  # nothing of it is sent again
            self.raw, self.hint = b"", replace(self.hint, prefix=None)
        self.ended = updates[-1].is_last
        if self.ended:
            updates = (*updates[:-1], replace(updates[-1], replicas=tuple(self._had_by)))
        self._sink.deliver(list(updates))

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        self.deliver([GenerationUpdate(self.request_id, "", (), error=error)])

    def end_cancelled(self) -> None:
        """End it as a worker ends a request that is aborted: each answer that goes on is cancelled."""
        left = [(index, len(ids)) for index, ids in enumerate(self._told) if ids is not None]
        self.deliver(
            [
                GenerationUpdate(
                    self.request_id,
                    "",
                    (),
                    self._cancelled(index, tokens),
                    index=index,
                    open_answers=len(left) - place,
                )
                for place, (index, tokens) in enumerate(left, 1)
            ]
        )

    def _cancelled(self, index: int, tokens: int) -> Completion:
        seed = answer_seed(self._seed, index) if self.kind == "generate" else 0
        prompt_tokens = 0 if index else self._prompt_tokens
        return Completion(FinishReason.CANCELLED, None, prompt_tokens, tokens, seed, _NO_TIME)
