"""A generator that answers with what a test wrote down: thoughts, text and calls, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.requests import GenerationUpdate
from support.fakes.generator import FakeGenerator


class ScriptedGenerator(FakeGenerator):
    """Plays ``pieces``, fields of an update each, one a step; then the answer ends for ``reason``.

    reused: tokens of every prompt that were in the cache already.
    """

    def __init__(
        self,
        pieces: Sequence[dict[str, Any]],
        reason: FinishReason = FinishReason.STOP,
        *,
        matched: str | None = None,
        reused: int = 0,
        **how: Any,
    ) -> None:
        super().__init__(**how)
        self.pieces = pieces
        self._reason, self._matched, self._reused = reason, matched, reused

    def _advance(self, request_id: str, live: Any) -> GenerationUpdate:
        update = super()._advance(request_id, live)
        if update.error is not None:
            return update
        ended = live.produced >= len(self.pieces)
        completion = self._complete(live, self._reason, self._matched) if ended else None
        if completion is not None:
            completion = replace(completion, cached_tokens=self._reused)
        piece = {"text": ""} | dict(self.pieces[live.produced - 1] if self.pieces else {})
        return replace(update, completion=completion, **piece)
