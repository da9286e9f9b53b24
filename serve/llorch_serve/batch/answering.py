"""The port through which a batch gets its answers: whoever runs one brings something that answers lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from llorch_serve.batch.lines import BatchLine
from llorch_serve.errors import WorkerError


@dataclass(frozen=True, slots=True)
class Usage:
    """What one answer cost, in tokens. cached_tokens: of the prompt, those that were not computed again."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to one line.

    status: as HTTP has it; from 400 on it is a failure.
    body: a JSON document, the same bytes whenever the same line is answered.
    retry_after_s: when whoever refused wants to be asked again; None: it did not say.
    """

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None
    usage: Usage = field(default_factory=Usage)


class Answerer(Protocol):
    """What answers lines: the HTTP front's routes in this process, or a worker elsewhere."""

    async def answer(self, line: BatchLine) -> LineAnswer:
        """Answer one line; many are asked for at once. Raises BatchStoppedError, and nothing else but
        asyncio's CancelledError.
        """


class BatchStoppedError(WorkerError):
    """No line can be answered any more: the model is another one now, or no worker came within patience.
    What has been answered is on the disk.
    """
