"""A sequence: one prompt on its way through the engine, as token ids and counters only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from llorch_serve.sampling import SamplingParams


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"  # a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # aborted by the caller


class SequenceStatus(enum.Enum):
    """Where a sequence is. WAITING -> PREFILL -> DECODE -> FINISHED; an abort leads to FINISHED from anywhere."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True)
class Sequence:
    """Token ids and progress of one request.

    prompt_ids: the prompt, at least one token.
    max_new_tokens: tokens that may be generated, already bounded by the context length.
    stop_ids: token ids that end it (the model's, unless ignored, and the request's).
    slot: row of the KV cache, while it has one.
    computed: tokens whose keys and values are in the KV cache.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    stop_ids: frozenset[int]
    seed: int
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int | None = None
    computed: int = 0
    generated: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def length(self) -> int:
        """Tokens in the sequence, prompt and generated."""
        return len(self.prompt_ids) + len(self.generated)
