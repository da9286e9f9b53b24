"""What a caller asks for and what it gets back, in plain Python: the command line and gRPC both speak these
types.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from llorch_serve.engine.load import Load
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import FieldViolation
from llorch_serve.providers import ProviderShare
from llorch_serve.sampling.logprobs import MAX_LOGPROBS, TokenLogprobs
from llorch_serve.sampling.params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function, as an assistant's message holds it; ``arguments`` is JSON text of an object."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A call that the model made, or a part of one: texts of the same index (which of the answer's calls)
    join.

    broken: the call has broken off: what was told of it is no call, and is in the text now.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    broken: bool = False


def whole_calls(parts: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Return the calls of an answer that has ended, whole and counted from 0, without those that broke
    off.
    """
    sound = [call for call in _joined_calls(parts) if not call.broken]
    return tuple(replace(call, index=place) for place, call in enumerate(sound))


def _joined_calls(parts: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Return parts of calls with those of the same call joined, in the order of the calls."""
    by_index: dict[int, list[ToolCallDelta]] = {}
    for part in parts:
        by_index.setdefault(part.index, []).append(part)
    return [
        ToolCallDelta(
            index,
            "".join(part.id for part in call),
            "".join(part.name for part in call),
            "".join(part.arguments for part in call),
            any(part.broken for part in call),
        )
        for index, call in sorted(by_index.items())
    ]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation; ``role`` is one that the model's template knows.

    content: text, or a list of texts for templates that take lists; None if the message has none, which a
        template can tell from an empty text.
    tool_call_id: which call a tool's message answers.
    reasoning_content: what the model thought before it answered.
    """

    role: str
    content: str | tuple[str, ...] | None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text; tokenizer.json's post-processor decides whether BOS is added, unless add_special_tokens is
    false: then nothing is.
    """

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used exactly as they are."""

    token_ids: tuple[int, ...]


class ToolMode(enum.Enum):
    """Whether a model calls tools."""

    AUTO = "auto"  # as it likes
    NONE = "none"  # it is not told of any
    REQUIRED = "required"  # its answer is one call or several, held by a grammar


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether a model calls tools, and which.

    names: of the tools that may be called; empty: all of them. With AUTO the model is not told of others,
        with REQUIRED it is.
    """

    mode: ToolMode = ToolMode.AUTO
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered with the model's own chat template and opened for the assistant's answer.

    tools, documents: JSON text of an object each.
    tool_choice: whether and which of the tools are called.
    parallel_tool_calls: False: an answer ends with its first call.
    template_name: of several templates; None: ``tool_use`` if there are tools and such a template, else
        ``default``.
    template_arguments: JSON text of an object: further variables of the template, ``add_generation_prompt``
        too.
    continue_final_message: leave the last message open, so that the answer goes on with it.
    allow_control_tokens: let special tokens' texts inside the conversation become control tokens.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    template_name: str | None = None
    template_arguments: str | None = None
    continue_final_message: bool = False
    allow_control_tokens: bool = False
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """What a request has become in other processes that serve the same model.

    token_ids, text: the prompt, and what it stands for.
    answers: of each answer the tokens that have been told of it, which it goes on from; None: it has ended.
        Empty: nothing has been told.
    """

    token_ids: tuple[int, ...]
    text: str
    answers: tuple[tuple[int, ...] | None, ...] = ()


MIN_PRIORITY: Final = -10
MAX_PRIORITY: Final = 10


MAX_ANSWERS: Final = 16


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Which answers to a request come back, and what of the prompt comes with them.

    n: answers, 1..16, each with a seed of its own.
    best_of: n..16: generate so many, and return the n of the highest mean log-probability.
    prompt_logprobs: 0..20: list the log-probability of each token of the prompt, and so many of the likeliest
        ones.
    echo: the prompt's text comes before the answer's.
    """

    n: int = 1
    best_of: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False

    @property
    def generated(self) -> int:
        """How many answers are generated."""
        return self.n if self.best_of is None else self.best_of

    def violations(self, *, max_tokens: int | None) -> list[FieldViolation]:
        """Return every field that is out of range, below the name that fronts give them: ``sampling``."""
        bad: list[FieldViolation] = []

        def check(name: str, value: object, ok: bool, accepted: str) -> None:
            if not ok:
                bad.append(FieldViolation(f"sampling.{name}", f"found {value!r}, expected {accepted}"))

        told = self.prompt_logprobs
        fits = told is None or 0 <= told <= MAX_LOGPROBS
        check("prompt_logprobs", told, fits, f"an integer from 0 to {MAX_LOGPROBS}")
        check("n", self.n, 1 <= self.n <= MAX_ANSWERS, f"an integer from 1 to {MAX_ANSWERS}")
        if self.generated > 1 and max_tokens == 0:
            name = "n" if self.best_of is None else "best_of"
            check(name, self.generated, False, "1 where max_tokens is 0")
        fits = self.best_of is None or self.n <= self.best_of <= MAX_ANSWERS
        check("best_of", self.best_of, fits, f"an integer from n ({self.n}) to {MAX_ANSWERS}")
        return bad


def option_violations(
    sampling: SamplingParams, answers: AnswerOptions, *, vocab_size: int
) -> list[FieldViolation]:
    """Return every option of a request that is out of range; empty if all is well."""
    return [
        *sampling.number_violations(vocab_size=vocab_size),
        *answers.violations(max_tokens=sampling.max_tokens),
        *sampling.ending_violations(vocab_size=vocab_size),
    ]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for generated text.

    request_id: chosen by the caller or the servicer; unique among live requests.
    client_id: whose request it is; clients are served fairly among each other. Empty: one client for all who
        give none.
    owner: the caller, where the worker knows its callers; a ``client_id`` is one of its own. Empty: not
        known.
    correlation_id, traceparent: of the caller's own records and trace (W3C), for logs and spans alone.
    priority: MIN_PRIORITY to MAX_PRIORITY; the highest of a client's waiting requests starts first, see
        ``waiting.py``.
    fingerprint: if given, that of the model which must answer.
    answers: which answers come back.
    encoded: what the front of a cluster has made of it already; else None.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    client_id: str = ""
    owner: str = ""
    correlation_id: str = ""
    traceparent: str = ""
    priority: int = 0
    fingerprint: str | None = None
    answers: AnswerOptions = AnswerOptions()
    encoded: EncodedPrompt | None = None


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A request for the log-likelihoods of continuations, each one right behind the same context.

    context: without tokens it stands for the token that begins a text (BOS, else EOS).
    logprobs: 0..20: list the log-probability of each token, and so many of the likeliest ones; None: only
        sums.
    client_id, owner, correlation_id, traceparent, priority, fingerprint: as in :class:`GenerationRequest`.
    """

    request_id: str
    context: Prompt
    continuations: tuple[TextPrompt | TokenPrompt, ...]
    logprobs: int | None = None
    client_id: str = ""
    owner: str = ""
    correlation_id: str = ""
    traceparent: str = ""
    priority: int = 0
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """How likely a continuation is.

    logprob: sum of the natural log-probabilities of its tokens, each given all before it.
    is_greedy: whether each token is the likeliest one at its place, so that greedy decoding would have said
        the same.
    token_count, context_tokens: tokens of the continuation, and of the context before it.
    cached_tokens: how many of the context's the KV cache already held.
    logprobs: one for each of its tokens if the request asked for them, else none.
    """

    logprob: float
    is_greedy: bool
    token_count: int
    context_tokens: int
    cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A request for how relevant documents are to a query.

    instruction: what makes a document relevant; None: what the model was trained on.
    client_id, owner, correlation_id, traceparent, priority: as in :class:`GenerationRequest`.
    """

    request_id: str
    query: str
    documents: tuple[str, ...]
    instruction: str | None = None
    client_id: str = ""
    owner: str = ""
    correlation_id: str = ""
    traceparent: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """A request for the vectors of texts.

    dimensions: how many numbers of each vector are wanted, the first ones; the rest is cut off and what is
        left divided by its length, if vectors have length 1. None: all of them.
    truncate_prompt_tokens: cut texts that have more tokens than this, at their end but before what the
        tokenizer puts behind a text; -1: than the context holds. None: they are refused.
    client_id, owner, correlation_id, traceparent, priority, fingerprint: as in :class:`GenerationRequest`.
    """

    request_id: str
    inputs: tuple[Prompt, ...]
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    client_id: str = ""
    owner: str = ""
    correlation_id: str = ""
    traceparent: str = ""
    priority: int = 0
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class TextEmbedding:
    """A text's vector, [dimensions], and the tokens that it was made of."""

    values: npt.NDArray[np.float32]
    token_count: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one request in seconds.

    queue_s: from submission to the start of its first prefill step.
    prefill_s: from there to the first token (0 if no token was generated).
    decode_s: from the first token to the last.
    """

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """How an answer ended.

    prompt_tokens, cached_tokens: 0 but for the first answer of a request, so that a sum over answers is
        right.
    stop_matched: the stop string, or the text of the stop token, that ended it (reason STOP only).
    seed: the seed that sampling used; sending it again gives the same tokens.
    cached_tokens: tokens of the prompt whose keys and values were in the cache already.
    drafted_tokens, accepted_tokens: tokens that were guessed and checked, and how many of them were right.
    stop_logprobs: of the stop token that ended it, which is in no list, if the request asked for
        log-probabilities.
    """

    reason: FinishReason
    stop_matched: str | None
    prompt_tokens: int
    generated_tokens: int
    seed: int
    timings: Timings
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    stop_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class GenerationUpdate:
    """Progress of one answer to a request after one engine step.

    text: new text; may be empty while bytes of a character or the start of a possible stop string are held
        back.
    token_ids: tokens generated since the last update (a stop token is not among them).
    completion: set on the last update of an answer, and only there, unless ``error`` is set.
    error: the request failed; nothing follows.
    reasoning, tool_calls: parsed from answers to chats, where the model's format is known; ``text`` lacks
        them then.
    logprobs: one for each of ``token_ids`` if the request asked for them, else none.
    index: which of the request's answers it is.
    open_answers: answers that still go on after this update.
    prompt_logprobs: one for each token of the prompt but the first, if the request asked for them: with the
        first update of answer 0, and only there.
    score: of a continuation, with its only update; ``index`` says which.
    embedding: of a text, likewise.
    replicas: with the last update of a request that a front had replicas answer: those that have had it, the
        one that answered at the end.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None
    error: Exception | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0
    open_answers: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    score: ContinuationScore | None = None
    embedding: TextEmbedding | None = None
    replicas: tuple[str, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether this update ends its request."""
        return self.error is not None or (self.completion is not None and self.open_answers == 0)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing new in it."""
        told = self.text or self.token_ids or self.reasoning or self.tool_calls
        return not told and self.completion is None


class JoinedUpdates:
    """Successive updates of one answer, which become one. Each is looked at once, so that joining an answer
    at its end is quick.
    """

    __slots__ = ("_calls", "_ids", "_last", "_logprobs", "_prompt_logprobs", "_texts", "_thoughts")

    def __init__(self, first: GenerationUpdate) -> None:
        self._texts = [first.text]
        self._thoughts = [first.reasoning]
        self._ids = list(first.token_ids)
        self._calls = list(first.tool_calls)
        self._logprobs = list(first.logprobs)
        self._prompt_logprobs = list(first.prompt_logprobs)
        self._last = first

    @property
    def token_count(self) -> int:
        """How many tokens there are."""
        return len(self._ids)

    def add(self, update: GenerationUpdate) -> None:
        """Take the next update."""
        self._texts.append(update.text)
        self._thoughts.append(update.reasoning)
        self._ids += update.token_ids
        self._calls += update.tool_calls
        self._logprobs += update.logprobs
        self._prompt_logprobs += update.prompt_logprobs
        self._last = update

    def joined(self) -> GenerationUpdate:
        """Return all of them as one."""
        if len(self._texts) == 1:
            return self._last
        return replace(
            self._last,
            text="".join(self._texts),
            token_ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            reasoning="".join(self._thoughts),
            tool_calls=tuple(_joined_calls(self._calls)),
        )


class UpdateSink(Protocol):
    """Receives updates: once per step with all updates for this sink, on the engine's thread.

    The end of a request that has not got to the engine may come on another one, of whoever submits or aborts
    it, or of the compiler of grammars. Must not block.
    """

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        """Take updates of one request or several, in order."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a worker serves and how.

    provider_node_share: share of graph nodes on ``provider``, 0..1.
    kind: the tool that made the model's folder: llorch, onnxruntime-genai or optimum.
    limits: what that tool's graph cannot do, as phrases for people.
    provider_shares: nodes and weights of each provider, without their operators; empty from an older worker.
    device: the provider's, like ``cpu`` or ``cuda:1``; empty from an older worker.
    embedding_size: numbers of a text's vector; 0: the model embeds no texts, but generates.
    served_names: what clients may call the model beside ``model_id``, the one that answers tell first.
    capabilities: what it is asked for, as it was loaded: ``generate``, ``tokenize``, ``chat``, ``score``,
        ``rank``, ``structured``, ``embed``; empty from an older worker.
    """

    model_id: str
    fingerprint: str
    context_length: int
    vocab_size: int
    precision: str
    head_precision: str
    provider: str
    provider_node_share: float
    slots: int
    has_chat_template: bool
    stop_token_ids: tuple[int, ...]
    version: str
    batch_invariant: bool
    kind: str = "llorch"
    limits: tuple[str, ...] = ()
    provider_shares: tuple[ProviderShare, ...] = ()
    device: str = ""
    served_names: tuple[str, ...] = ()
    embedding_size: int = 0
    capabilities: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that the model may be asked for by, the one that answers tell first."""
        return tuple(dict.fromkeys((*self.served_names, self.model_id)))


Abort: TypeAlias = Callable[[], None]
"""Ends the one request that it was returned for, if that is still live; its sink gets a last update with
reason CANCELLED.

Any thread; idempotent. It knows the request and not its id, which another way in may have given to a later
one.
"""


class TextGenerator(Protocol):
    """What the gRPC servicer needs from the engine side. Implemented by
    :class:`llorch_serve.worker.worker.Worker`.

    All methods may be called from any thread.
    """

    def submit(self, request: GenerationRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and queue a request; return what ends it early.

        Raises InvalidRequestError (every bad field), UnsupportedError, QueueFullError (of grammars) or
        UnavailableError; after a normal return the sink gets updates until one with ``is_last``, whose error
        is a QueueFullError where too many wait.
        """

    def submit_score(self, request: ScoreRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and queue the continuations of a request; each ends with one update that has its
        score.

        Returns and raises what :meth:`submit` does, and UnsupportedError where the model's graph cannot
        score.
        """

    def submit_rank(self, request: RankRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and queue the documents of a request; each ends with two updates, one with the
        score of "yes" and then one with that of "no".

        Returns and raises what :meth:`submit` does, and UnsupportedError where the model does not rank.
        """

    def submit_embedding(self, request: EmbedRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and queue the texts of a request; each ends with one update that has its vector.

        Returns and raises what :meth:`submit` does, and UnsupportedError where the model embeds no texts.
        """

    def violations(
        self, prompt: Prompt, sampling: SamplingParams, answers: AnswerOptions
    ) -> list[FieldViolation]:
        """Return every bad field of a prompt and its options, as :meth:`submit` would name them."""

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt and the text they stand for. Raises InvalidRequestError."""

    def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool) -> str:
        """Return the text of token ids. Raises InvalidRequestError for ids outside the vocabulary."""

    def model_info(self) -> ModelInfo:
        """Describe what is served."""

    def load(self) -> Load:
        """Return how busy the engine is, as of its last step."""
