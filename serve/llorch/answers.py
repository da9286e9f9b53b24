"""What a model answers, as its callers read it."""

from __future__ import annotations

from dataclasses import dataclass

from llorch_serve.errors import LlorchError
from llorch_serve.requests import (
    GenerationUpdate,
    JoinedUpdates,
    Timings,
    ToolCall,
    ToolCallDelta,
    whole_calls,
)
from llorch_serve.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    finish_reason: ``stop`` (a stop token, a stop string, or a form that lets nothing follow), ``length``
        (``max_tokens``, or the context is full) or ``tool_calls``.
    stop_matched: the stop string, or the stop token's text, that ended it.
    reasoning, tool_calls: read out of answers to chats where the model's format is known.
    prompt_tokens, generated_tokens, cached_tokens: counts; the last are those of the prompt that the KV cache
        held already.
    seed: sending it again gives the same tokens.
    logprobs, prompt_logprobs: one for each token, where they were asked for.
    drafted_tokens, accepted_tokens: tokens that were guessed and checked, and how many of them were right.
    timings: in seconds.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_matched: str | None
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    seed: int
    timings: Timings
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text of an answer that streams.

    tool_calls: parts of calls; texts of the same index join, and one with ``broken`` says that the call is
        none. answer: the whole of it, with the last chunk.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    answer: Answer | None = None


def read_answer(update: GenerationUpdate) -> Answer:
    """Return the answer that a joined update holds. Raises LlorchError if it has no completion."""
    completion = update.completion
    if completion is None:
        raise LlorchError("an answer ended without a completion; please report this")
    return Answer(
        text=update.text,
        token_ids=update.token_ids,
        finish_reason=completion.reason.value,
        stop_matched=completion.stop_matched,
        prompt_tokens=completion.prompt_tokens,
        generated_tokens=completion.generated_tokens,
        cached_tokens=completion.cached_tokens,
        seed=completion.seed,
        timings=completion.timings,
        reasoning=update.reasoning,
        tool_calls=tuple(
            ToolCall(call.name, call.arguments, call.id) for call in whole_calls(update.tool_calls)
        ),
        logprobs=update.logprobs,
        prompt_logprobs=update.prompt_logprobs,
        drafted_tokens=completion.drafted_tokens,
        accepted_tokens=completion.accepted_tokens,
    )


class Chunks:
    """Updates of one answer on their way to chunks."""

    def __init__(self) -> None:
        self._joined: JoinedUpdates | None = None

    def chunk(self, update: GenerationUpdate) -> Chunk:
        """Return the next one."""
        if self._joined is None:
            self._joined = JoinedUpdates(update)
        else:
            self._joined.add(update)
        return Chunk(
            update.text,
            update.token_ids,
            update.reasoning,
            update.tool_calls,
            update.logprobs,
            read_answer(self._joined.joined()) if update.completion is not None else None,
        )
