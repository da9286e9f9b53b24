"""One request on its way through a replica: what its caller has been told, and how it ends if nothing more
comes.

``routed_generator.py`` runs it. Used on that generator's event loop, but for :meth:`RoutedCall.abort`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from llorch_serve.cluster.interfaces import CallKind, RoutingHint
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.requests import Completion, GenerationUpdate, Timings, UpdateSink

_NO_TIME = Timings(0.0, 0.0, 0.0)


class RoutedCall:
    """A request that has been taken.

    answers: how many updates with a completion it ends with. seed: of its sampling.
    begun: whether its caller has been told anything. ended: whether the last update has been delivered.
    """

    def __init__(
        self, kind: CallKind, raw: bytes, hint: RoutingHint, sink: UpdateSink, *, answers: int, seed: int = 0
    ) -> None:
        self.kind = kind
        self.raw = raw
        self.hint = hint
        self.begun = False
        self.ended = False
        self.task: asyncio.Task[None] | None = None
        self._sink = sink
        self._seed = seed
        self._open = dict.fromkeys(range(answers), 0)  # tokens so far, by the answer's index
        self._unwanted = False

    @property
    def request_id(self) -> str:
        """The request's id, as the caller knows it."""
        return self.hint.request_id

    @property
    def unwanted(self) -> bool:
        """Whether the caller has ended it."""
        return self._unwanted

    def cancel(self) -> None:
        """End it early: now, or as soon as it would begin."""
        self._unwanted = True
        if self.task is not None:
            self.task.cancel()

    def deliver(self, updates: Sequence[GenerationUpdate]) -> None:
        """Pass updates on to the caller."""
        for update in updates:
            if update.completion is not None:
                self._open.pop(update.index, None)
            elif update.index in self._open:
                self._open[update.index] += len(update.token_ids)
        self.begun = True
        self.ended = updates[-1].is_last
        self._sink.deliver(list(updates))

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        self.deliver([GenerationUpdate(self.request_id, "", (), error=error)])

    def end_cancelled(self) -> None:
        """End it as a worker ends a request that is aborted: each answer that goes on is cancelled."""
        left = sorted(self._open.items())
        self.deliver(
            [
                GenerationUpdate(
                    self.request_id,
                    "",
                    (),
                    Completion(FinishReason.CANCELLED, None, 0, tokens, self._seed, _NO_TIME),
                    index=index,
                    open_answers=len(left) - place,
                )
                for place, (index, tokens) in enumerate(left, 1)
            ]
        )
