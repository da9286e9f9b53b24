"""What observers are told of requests: how each begins, gives tokens and ends.

``tap.py`` tells it; metrics, narration and traces implement :class:`Observer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from llorch_serve.requests import (
    ChatPrompt,
    Completion,
    ContinuationScore,
    EmbedRequest,
    GenerationRequest,
    RankRequest,
    ScoreRequest,
)

EMBED: Final = "embeddings"
"""The operation of requests for vectors, as OpenTelemetry's conventions say."""

SCORE: Final = "score"
"""What observers call the end of a request for scores, beside the reasons that generation has."""


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What observers are told of a request: none of its texts, which would be kept until its end.

    operation: ``chat`` or ``text_completion``, as OpenTelemetry's conventions say, EMBED or SCORE.
    continuations: how many are to be scored, each context the same number of times. contexts: how many.
    temperature, top_p, top_k, max_tokens, seed: what was asked for; None: nothing was.
    """

    request_id: str
    operation: str
    correlation_id: str = ""
    traceparent: str = ""
    continuations: int = 0
    contexts: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None

    @classmethod
    def of(cls, request: GenerationRequest | ScoreRequest | RankRequest | EmbedRequest) -> RequestFacts:
        """Return those of a request."""
        ids = (request.correlation_id, request.traceparent)
        if isinstance(request, ScoreRequest):
            return cls(request.request_id, SCORE, *ids, continuations=len(request.continuations))
        if isinstance(request, RankRequest):
            documents = len(request.documents)
            return cls(request.request_id, SCORE, *ids, continuations=2 * documents, contexts=documents)
        if isinstance(request, EmbedRequest):
            return cls(request.request_id, EMBED, *ids)
        sampling = request.sampling
        return cls(
            request.request_id,
            "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion",
            *ids,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
        )


@dataclass(slots=True)
class Observed:
    """One request as it is seen from outside. Times are of ``time.perf_counter``, in seconds.

    submitted_ns: the same moment as ``submitted_s``, in nanoseconds since 1970.
    first_s, last_s: when its first and its last tokens came; None before.
    last_by_answer: when each answer's last tokens came. completions: of the answers, or continuations, that
        have ended.
    scores: of the continuations that have been scored.
    span: what a :class:`Tracing` observer has begun for it.
    """

    request: RequestFacts
    submitted_s: float
    submitted_ns: int
    first_s: float | None = None
    last_s: float | None = None
    last_by_answer: dict[int, float] = field(default_factory=dict)
    completions: list[Completion] = field(default_factory=list)
    scores: list[ContinuationScore] = field(default_factory=list)
    span: Any = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended, ``at_s`` on the clock of :class:`Observed`: with an error, or a completion.

    completion: of several answers, or continuations, the first one's, with the tokens of all.
    scored: every continuation of a request for scores has its score.
    replicas: see :class:`llorch_serve.requests.GenerationUpdate`.
    """

    at_s: float
    completion: Completion | None = None
    error: Exception | None = None
    scored: bool = False
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """One request that has been answered, for whoever keeps records. seconds: from its head to the answer's
    last byte.

    status: None if the client left before there was one.
    """

    method: str
    path: str
    status: int | None
    seconds: float
    correlation_id: str


class Observer(Protocol):
    """Learns of requests. Every method is called on one thread of its own, in the order of events."""

    def begun(self, seen: Observed) -> None:
        """A request has come; it may still be refused."""

    def produced(self, seen: Observed, tokens: int, gap_s: float | None) -> None:
        """Tokens have come, ``gap_s`` after the same answer's last ones; None: they are its first."""

    def ended(self, seen: Observed, ending: Ending) -> None:
        """A request has ended, or was refused."""

    def close(self) -> None:
        """Nothing follows: send on what is still held."""


@runtime_checkable
class Tracing(Protocol):
    """An observer whose records of a request others add theirs to."""

    def open(self, seen: Observed) -> str:
        """Begin a request's span, on the thread that submits it; return the traceparent that whoever works
        for it is told, empty where there is none.
        """
