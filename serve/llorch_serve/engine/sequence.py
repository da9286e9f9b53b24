"""A sequence: one prompt on its way through the engine, with all that the engine needs to run it.

The worker builds a sequence whole; the scheduler and the engine record its progress. :class:`TokenEvent` is
what comes out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llorch_serve.engine.payoff import DraftRecord

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from llorch_serve.engine.draft import ModelDraft
    from llorch_serve.engine.lookup import PromptLookup
    from llorch_serve.engine.shared_prompt import SharedPrompt
    from llorch_serve.sampling.logprobs import TokenScores
    from llorch_serve.sampling.prompt_scores import PromptScores
    from llorch_serve.sampling.sampler import SamplingRow


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


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a sequence.

    max_new_tokens: tokens that may be generated, already bounded by the context length; 0: it ends with its
        prompt.
    stop_ids: token ids that end it (the model's, unless ignored, and the request's).
    """

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Ownership:
    """Whose sequence it is.

    client: for fairness; one name for all who gave none.
    cache_salt: it starts from what sequences of the same salt left in the cache, and from nothing else.
    priority: the highest of a client's waiting sequences starts first.
    """

    client: str = ""
    cache_salt: str = ""
    priority: int = 0


@dataclass(slots=True)
class CacheProgress:
    """How far a sequence is in the KV cache. All but ``slot`` count tokens from the first one on.

    slot: row of the KV cache, while it has one.
    computed: tokens whose keys and values are in the KV cache.
    written: positions that calls have written, those of wrong guesses included.
    prefilled: how many of the computed ones, from the first on, prefill calls computed.
    reused: tokens of the prompt that were in the cache already.
    """

    slot: int | None = None
    computed: int = 0
    written: int = 0
    prefilled: int = 0
    reused: int = 0


@dataclass(slots=True)
class DraftCounts:
    """drafted, accepted: tokens that were guessed and checked, and how many of them were right. lately: the
    same of late, by which the next guesses are decided on.
    """

    drafted: int = 0
    accepted: int = 0
    lately: DraftRecord = field(default_factory=DraftRecord)


@dataclass(slots=True)
class Times:
    """Seconds on the engine's clock; None if not yet."""

    submitted_at: float = 0.0
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """Token ids and progress of one answer, or of one prompt that is scored, or one text that is embedded.

    token_ids: the prompt (at least one token), then what was generated.
    prompt_length: tokens of the prompt.
    limits: what ends it.
    sampling: how its tokens are chosen; None: it ends with its prompt, so that none is.
    index: which of its request's sequences it is.
    ownership: whose it is.
    lookup, draft: guesses of what follows, from its own text or by a draft model; None: none of these.
    logprobs: how many of the likeliest tokens are told with each token's log-probability; None: nothing is
        told.
    shared: the prompt, where other sequences have the same one and only the first computes it.
    prompt_scores: takes the log-probabilities of the prompt's own tokens; None: nobody asked.
    status, cache, drafts, times: its progress.
    """

    request_id: str
    token_ids: list[int]
    prompt_length: int
    limits: Limits
    sampling: SamplingRow | None = None
    index: int = 0
    ownership: Ownership = Ownership()
    lookup: PromptLookup | None = None
    draft: ModelDraft | None = None
    logprobs: int | None = None
    shared: SharedPrompt | None = None
    prompt_scores: PromptScores | None = None
    times: Times = field(default_factory=Times)
    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)
    cache: CacheProgress = field(default_factory=CacheProgress, init=False)
    drafts: DraftCounts = field(default_factory=DraftCounts, init=False)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_length

    @property
    def reusable(self) -> int:
        """Tokens of the prompt whose keys and values may come from the cache, since nothing else is wanted of
        them.
        """
        if self.prompt_scores is None:
            return self.prompt_length
        return min(self.prompt_length, self.prompt_scores.first - 1)

    @property
    def most_tokens(self) -> int:
        """The longest it may become, prompt included."""
        return self.prompt_length + self.limits.max_new_tokens

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self.limits.max_new_tokens - self.generated

    @property
    def guesses(self) -> PromptLookup | ModelDraft | None:
        """Return what guesses the tokens that follow."""
        return self.lookup if self.draft is None else self.draft

    @property
    def pending(self) -> int:
        """Tokens that must still go through the model before the next one can be sampled."""
        return len(self.token_ids) - self.cache.computed


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of one sequence, or its end.

    token_id: the new token; None if the sequence ended without one.
    finish: why it ended with this event; None while it goes on.
    is_stop_token: ``token_id`` is what ended it, and is not part of the answer.
    error: the sequence failed; nothing follows.
    scores: the token's log-probabilities, if the sequence asks for them.
    embedding: the text's vector [hidden_size], where texts are embedded and it did not fail.
    """

    sequence: Sequence = field(repr=False)
    token_id: int | None
    finish: FinishReason | None = None
    is_stop_token: bool = False
    error: Exception | None = None
    scores: TokenScores | None = None
    embedding: npt.NDArray[np.float32] | None = None
