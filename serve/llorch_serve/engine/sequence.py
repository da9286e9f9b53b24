"""A sequence: one prompt on its way through the engine, as token ids, counters and time stamps."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from llorch_serve.engine.lookup import PromptLookup
from llorch_serve.engine.shared_prompt import SharedPrompt
from llorch_serve.sampling.logprobs import TokenScores
from llorch_serve.sampling.prompt_scores import PromptScores


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"  # a stop token, a stop string, or a grammar that lets nothing follow
    LENGTH = "length"  # max_tokens, or the context is full
    TOOL_CALLS = "tool_calls"  # as STOP, after calls of tools
    CANCELLED = "cancelled"  # aborted by the caller


class SequenceStatus(enum.Enum):
    """Where a sequence is. WAITING -> PREFILL -> DECODE -> FINISHED; an abort leads to FINISHED from
    anywhere.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Token ids and progress of one request.

    token_ids: the prompt (at least one token), then what was generated.
    prompt_length: tokens of the prompt.
    max_new_tokens: tokens that may be generated, already bounded by the context length; 0: it ends with its
        prompt.
    stop_ids: token ids that end it (the model's, unless ignored, and the request's).
    client: whose request it is, for fairness; one name for all who gave none.
    cache_salt: it starts from what sequences of the same salt left in the cache, and from nothing else.
    priority: the highest of a client's waiting sequences starts first.
    lookup: guesses of what follows; None: no guessing.
    logprobs: how many of the likeliest tokens are told with each token's log-probability; None: nothing is
        told.
    shared: the prompt, where other sequences have the same one and only the first computes it.
    prompt_scores: takes the log-probabilities of the prompt's own tokens; None: nobody asked.
    complete_at: generated tokens after which its grammar lets nothing follow; None: not known yet, or no
        grammar.
    slot: row of the KV cache, while it has one.
    computed: tokens whose keys and values are in the KV cache.
    written: positions that calls have written, those of wrong guesses included.
    prefilled: how many of the computed ones, from the first on, prefill calls computed.
    cached_tokens: tokens of the prompt that were in the cache already.
    drafted, accepted: tokens that were guessed, and how many of them were right.
    submitted_at, started_at, first_token_at, last_token_at: seconds on the engine's clock; None if not yet.
    """

    request_id: str
    token_ids: list[int]
    prompt_length: int
    max_new_tokens: int
    stop_ids: frozenset[int]
    client: str = ""
    cache_salt: str = ""
    priority: int = 0
    lookup: PromptLookup | None = None
    logprobs: int | None = None
    shared: SharedPrompt | None = None
    prompt_scores: PromptScores | None = None
    complete_at: int | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int | None = None
    computed: int = 0
    written: int = 0
    prefilled: int = 0
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    submitted_at: float = 0.0
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_length

    @property
    def reusable(self) -> int:
        """Tokens of the prompt whose keys and values may come from the cache, since nothing else is wanted of
        them.
        """
        return (
            self.prompt_length
            if self.prompt_scores is None
            else min(self.prompt_length, self.prompt_scores.first - 1)
        )

    @property
    def most_tokens(self) -> int:
        """The longest it may become, prompt included."""
        return self.prompt_length + self.max_new_tokens

    @property
    def pending(self) -> int:
        """Tokens that must still go through the model before the next one can be sampled."""
        return len(self.token_ids) - self.computed


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of one sequence, or its end.

    token_id: the new token; None if the sequence ended without one.
    finish: why it ended with this event; None while it goes on.
    is_stop_token: ``token_id`` is what ended it, and is not part of the answer.
    error: the sequence failed; nothing follows.
    scores: the token's log-probabilities, if the sequence asks for them.
    """

    sequence: Sequence = field(repr=False)
    token_id: int | None
    finish: FinishReason | None = None
    is_stop_token: bool = False
    error: Exception | None = None
    scores: TokenScores | None = None
