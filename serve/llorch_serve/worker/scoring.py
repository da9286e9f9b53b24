"""What a request for log-likelihoods asks, checked and as token ids.

Requests come from gRPC or the command line; the worker runs the token ids of each continuation behind those
of the context, and ``scores.py`` turns what is found into an answer.

Texts become tokens as lm-eval does it, so that figures can be compared: white space at the end of the context
belongs to the continuation; the context is encoded alone, context and continuation are encoded together, and
what goes beyond the context's number of tokens is the continuation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.requests import Prompt, ScoreRequest, TextPrompt, TokenPrompt
from llorch_serve.sampling.logprobs import MAX_LOGPROBS
from llorch_serve.worker.prompts import PromptEncoder

MAX_CONTINUATIONS: Final = 256

MAX_SCORED_CHARS: Final = 16 * 2**20
"""Of all texts of one request as they are encoded, the context with each continuation; 256 contexts of 16,000
tokens.
"""

MAX_PLACES: Final = 2**17
"""Log-probabilities that one answer may list, alternatives included, so that it stays within a message."""


@dataclass(frozen=True, slots=True)
class ScoredPair:
    """Token ids of a context, at least one, and of its continuation, at least one."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return both."""
        return self.context + self.continuation


def encode_pairs(
    request: ScoreRequest, prompts: PromptEncoder, *, prefix_id: int | None, vocab_size: int, context: int
) -> tuple[ScoredPair, ...]:
    """Return a pair for each continuation.

    prefix_id: the token that stands for a context without tokens; None: the model has none.
    context: most tokens that fit before the last one of a continuation.
    Raises InvalidRequestError with every bad field.
    """
    bad = _range_violations(request)
    if bad:
        raise InvalidRequestError(bad)
    _check_chars(request, prompts, context)
    pairs = []
    before = _caught(bad, lambda: _encode_context(request.context, prompts, context), "context")
    if before is not None and len(before) > context:  # else it would be encoded again with each continuation
        found = (
            f"found {len(before)} tokens; the context holds {context}, continuation included, and one more "
            f"is scored"
        )
        raise InvalidRequestError([FieldViolation("context", found)])
    for index, continuation in enumerate(request.continuations):
        path = f"continuations[{index}]"
        after = _caught(bad, partial(_encode, request.context, continuation, prompts, context), path)
        if before is None or after is None:
            continue
        if isinstance(request.context, TextPrompt) and isinstance(continuation, TextPrompt):
            after = after[len(before) :]
        pair = ScoredPair(before or (() if prefix_id is None else (prefix_id,)), after)
        bad += _token_violations(pair, path, vocab_size=vocab_size, context=context)
        pairs.append(pair)
    if not bad and request.logprobs is not None:
        bad += place_violations(sum(len(pair.continuation) for pair in pairs), request.logprobs, "logprobs")
    if bad:
        raise InvalidRequestError(list(dict.fromkeys(bad)))  # the context's faults are one fault
    return tuple(pairs)


def place_violations(tokens: int, alternatives: int, field: str) -> list[FieldViolation]:
    """Return what keeps an answer from listing so many tokens with so many alternatives each; empty if all is
    well.
    """
    places = tokens * (alternatives + 1)
    if places <= MAX_PLACES:
        return []
    found = (
        f"found {places} log-probabilities for {tokens} tokens, expected at most {MAX_PLACES}; ask for "
        f"fewer alternatives"
    )
    return [FieldViolation(field, found)]


def _range_violations(request: ScoreRequest) -> list[FieldViolation]:
    bad = []
    count = len(request.continuations)
    if not 1 <= count <= MAX_CONTINUATIONS:
        bad.append(FieldViolation("continuations", f"found {count}, expected 1 to {MAX_CONTINUATIONS}"))
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
        found = f"found {request.logprobs}, expected an integer from 0 to {MAX_LOGPROBS}"
        bad.append(FieldViolation("logprobs", found))
    return bad


def _check_chars(request: ScoreRequest, prompts: PromptEncoder, context: int) -> None:
    """Raise InvalidRequestError where texts are too long to be encoded as often as it takes: a context with
    each continuation.
    """
    before = len(request.context.text) if isinstance(request.context, TextPrompt) else 0
    texts = [item.text for item in request.continuations if isinstance(item, TextPrompt)]
    found = before * len(texts) + sum(map(len, texts))
    most = max(prompts.most_chars(context), MAX_SCORED_CHARS)
    if found > most:
        problem = (
            f"found {found} characters, the context's with each of {len(texts)} texts; expected at most "
            f"{most}; send fewer"
        )
        raise InvalidRequestError([FieldViolation("continuations", problem)])


def _encode_context(context: Prompt, prompts: PromptEncoder, most: int) -> tuple[int, ...]:
    if isinstance(context, TextPrompt):
        context = TextPrompt(context.text.rstrip())
    return prompts.encode(context, context=most)[0]


def _encode(
    context: Prompt, continuation: TextPrompt | TokenPrompt, prompts: PromptEncoder, most: int
) -> tuple[int, ...]:
    """Return a continuation's tokens; those of a text behind a text with the context's before them.

    A text behind a text is encoded with it, as the border between them may be inside a token.
    """
    if isinstance(continuation, TokenPrompt):
        return prompts.encode(continuation, context=most)[0]
    if isinstance(context, TextPrompt):
        return prompts.encode(TextPrompt(context.text + continuation.text), context=most)[0]
    prompts.check_chars(len(continuation.text), context=most)
    return prompts.tokenizer.encode(continuation.text, add_special_tokens=False, most=most)


def _caught(
    bad: list[FieldViolation], encode: Callable[[], tuple[int, ...]], path: str
) -> tuple[int, ...] | None:
    """Return what ``encode`` returns, or None where it refuses; then ``bad`` gets the faults, named below
    ``path``.
    """
    try:
        return encode()
    except InvalidRequestError as error:
        bad += [FieldViolation(v.field.replace("input", path, 1), v.description) for v in error.violations]
        return None


def _token_violations(pair: ScoredPair, path: str, *, vocab_size: int, context: int) -> list[FieldViolation]:
    bad, before, after = [], pair.context, pair.continuation
    if not before:
        found = (
            "found a context without tokens, and the model has no token that begins a text; expected at "
            "least one"
        )
        bad.append(FieldViolation("context", found))
    if not after:
        bad.append(FieldViolation(path, "found no tokens beyond the context's, expected at least one"))
    if len(before) + len(after) - 1 > context:
        found = (
            f"found {len(before)} tokens of context and {len(after)} of continuation, "
            f"{len(before) + len(after)} together; "
            f"the context holds {context}, and one more is scored"
        )
        bad.append(FieldViolation(path, found))
    # A tokenizer may know more tokens than the model has embeddings, and kernels do not all check their
    # bounds.
    for field, ids in (("context", before), (path, after)):
        if ids and max(ids) >= vocab_size:
            found = f"found token {max(ids)}; this model knows ids 0 to {vocab_size - 1}"
            bad.append(FieldViolation(field, found))
    return bad
