"""What a caller asks for and what it gets back, in plain Python: the command line and gRPC both speak these types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

from llorch_serve.errors import FieldViolation
from llorch_serve.load import Load
from llorch_serve.sampling import SamplingParams
from llorch_serve.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation; ``role`` is one that the model's template knows.

    content: None if the message has none, which a template can tell from an empty text.
    """

    role: str
    content: str | None


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text; tokenizer.json's post-processor decides whether BOS is added."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used exactly as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered with the model's own chat template and opened for the assistant's answer."""

    messages: tuple[ChatMessage, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


MIN_PRIORITY: Final = -10
MAX_PRIORITY: Final = 10


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for generated text.

    request_id: chosen by the caller or the servicer; unique among live requests.
    client_id: whose request it is; clients are served fairly among each other. Empty: one client for all who give none.
    correlation_id, traceparent: of the caller's own records and trace (W3C), for logs and spans alone.
    priority: MIN_PRIORITY to MAX_PRIORITY; the highest of a client's waiting requests starts first, see ``waiting.py``.
    fingerprint: if given, that of the model which must answer.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    client_id: str = ""
    correlation_id: str = ""
    traceparent: str = ""
    priority: int = 0
    fingerprint: str | None = None


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
    """How a request ended.

    stop_matched: the stop string, or the text of the stop token, that ended it (reason STOP only).
    seed: the seed that sampling used; sending it again gives the same tokens.
    cached_tokens: tokens of the prompt whose keys and values were in the cache already.
    drafted_tokens, accepted_tokens: tokens guessed from the sequence's own text, and how many of them were right.
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


@dataclass(frozen=True, slots=True)
class GenerationUpdate:
    """Progress of one request after one engine step.

    text: new text; may be empty while bytes of a character or the start of a possible stop string are held back.
    token_ids: tokens generated since the last update (a stop token is not among them).
    completion: set on the last update of a request, and only there, unless ``error`` is set.
    error: the request failed; nothing follows.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None
    error: Exception | None = None

    @property
    def is_last(self) -> bool:
        """Whether this update ends its request."""
        return self.completion is not None or self.error is not None


class UpdateSink(Protocol):
    """Receives updates. Called on the engine's thread, once per step with all updates for this sink; must not block."""

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        """Take the updates of one engine step."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a worker serves and how.

    provider_node_share: share of graph nodes on ``provider``, 0..1.
    kind: the tool that made the model's folder: llorch, onnxruntime-genai or optimum.
    limits: what that tool's graph cannot do, as phrases for people.
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


class TextGenerator(Protocol):
    """What the gRPC servicer needs from the engine side. Implemented by :class:`llorch_serve.worker.Worker`.

    All methods may be called from any thread.
    """

    def submit(self, request: GenerationRequest, sink: UpdateSink) -> None:
        """Check, tokenise and queue a request.

        Raises InvalidRequestError (every bad field), QueueFullError or UnavailableError; after a normal return
        the sink gets updates until one with ``is_last``.
        """

    def abort(self, request_id: str) -> None:
        """End a request, if it is live; its sink gets a last update with reason CANCELLED. Idempotent."""

    def violations(self, prompt: Prompt, sampling: SamplingParams) -> list[FieldViolation]:
        """Return every bad field of a prompt and its sampling settings, as :meth:`submit` would name them."""

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt and the text they stand for. Raises InvalidRequestError."""

    def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool) -> str:
        """Return the text of token ids. Raises InvalidRequestError for ids outside the vocabulary."""

    def model_info(self) -> ModelInfo:
        """Describe what is served."""

    def load(self) -> Load:
        """Return how busy the engine is, as of its last step."""
