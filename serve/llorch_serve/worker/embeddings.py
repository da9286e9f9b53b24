"""The vectors of one request's texts: from what is asked to sequences, and from the engine's vectors to
updates.

The worker makes an :class:`Embeddings` for each request. Nothing is generated for it: its sequences end with
their texts, and each gives one update.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_serve.engine.sequence import Limits, Ownership, Sequence, Times, TokenEvent
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.requests import (
    EmbedRequest,
    GenerationUpdate,
    Prompt,
    TextEmbedding,
    TextPrompt,
    TokenPrompt,
    UpdateSink,
)
from llorch_serve.worker.jobs import ended
from llorch_serve.worker.prompts import PromptEncoder

MAX_TEXTS: Final = 2048
"""Of one request, as OpenAI has it."""

MAX_NUMBERS: Final = 2**21
"""Of all vectors of one answer, so that it stays within a message: 2,048 vectors of 1,024."""

_WHOLE_CONTEXT: Final = -1
_MAX_NAMED: Final = 32  # bad texts that are named one by one


@dataclass(slots=True, eq=False)
class Embeddings:
    """Implements :class:`llorch_serve.worker.jobs.Job`.

    sequences: one for each text. dimensions: numbers that are told of each vector. normalised: vectors have
    length 1.
    """

    request_id: str
    sink: UpdateSink
    sequences: tuple[Sequence, ...]
    dimensions: int
    normalised: bool
    open: int = field(init=False)
    aborted: bool = field(default=False, init=False)
    _ended: set[int] = field(default_factory=set, init=False)  # indices of sequences

    def __post_init__(self) -> None:
        self.open = len(self.sequences)

    def take(self, event: TokenEvent) -> tuple[list[GenerationUpdate], bool]:
        """Take the one event of a sequence; return its vector, or how it ended."""
        sequence = event.sequence
        mine = sequence.index < len(self.sequences) and self.sequences[sequence.index] is sequence
        if not mine or sequence.index in self._ended:
            return [], False
        completion = None
        if event.error is None and event.finish is not None:
            completion = replace(ended(sequence, event.finish), prompt_tokens=sequence.prompt_length)
            self._ended.add(sequence.index)
        still_open = self.open - (completion is not None)
        self.open = 0 if event.error is not None else still_open
        vector = event.embedding
        update = GenerationUpdate(
            self.request_id,
            "",
            (),
            completion,
            error=event.error,
            index=sequence.index,
            open_answers=still_open,
            embedding=None if vector is None else self._told(vector, sequence.prompt_length),
        )
        return [update], False

    def _told(self, vector: npt.NDArray[np.float32], tokens: int) -> TextEmbedding:
        cut = vector[: self.dimensions]
        if self.normalised and len(cut) < len(vector):
            length = float(np.linalg.norm(cut.astype(np.float64)))
            cut = cut / np.float32(length) if length else cut
        return TextEmbedding(np.array(cut, np.float32), tokens)


def embedded_ids(
    request: EmbedRequest, prompts: PromptEncoder, *, context: int, size: int
) -> list[tuple[int, ...]]:
    """Return the token ids of each text of a request.

    context: most tokens of a text. size: numbers of a vector. Raises InvalidRequestError with every bad
    field.
    """
    bad = _range_violations(request, context=context, size=size)
    if bad:
        raise InvalidRequestError(bad)
    found = []
    for index, text in enumerate(request.inputs):
        try:
            ids = _ids(text, request.truncate_prompt_tokens, prompts, context)
        except InvalidRequestError as error:
            bad += [FieldViolation(f"inputs[{index}]", each.description) for each in error.violations]
        else:
            bad += _text_violations(ids, f"inputs[{index}]", prompts, context)
            found.append(ids)
        if len(bad) >= _MAX_NAMED:
            break
    if bad:
        raise InvalidRequestError(bad)
    return found


def embedded_sequences(
    request: EmbedRequest, texts: Seq[tuple[int, ...]], *, ownership: Ownership, now: float
) -> tuple[Sequence, ...]:
    """Return a sequence for each text. now: seconds on the engine's clock."""
    return tuple(
        Sequence(
            request_id=request.request_id,
            token_ids=list(ids),
            prompt_length=len(ids),
            limits=Limits(max_new_tokens=0),
            index=index,
            ownership=ownership,
            times=Times(submitted_at=now),
        )
        for index, ids in enumerate(texts)
    )


def _range_violations(request: EmbedRequest, *, context: int, size: int) -> list[FieldViolation]:
    bad, count, wanted = [], len(request.inputs), request.dimensions
    if not 1 <= count <= MAX_TEXTS:
        bad.append(FieldViolation("inputs", f"found {count} texts, expected 1 to {MAX_TEXTS}"))
    if wanted is not None and not 1 <= wanted <= size:
        bad.append(FieldViolation("dimensions", f"found {wanted}, expected 1 to {size}"))
    elif count * (wanted or size) > MAX_NUMBERS:
        found = (
            f"found {count} texts, whose vectors of {wanted or size} numbers are more than the {MAX_NUMBERS} "
            f"numbers of an answer; send at most {MAX_NUMBERS // (wanted or size)} at once"
        )
        bad.append(FieldViolation("inputs", found))
    kept = request.truncate_prompt_tokens
    if kept is not None and kept != _WHOLE_CONTEXT and not 1 <= kept <= context:
        found = f"found {kept}, expected 1 to {context}, or {_WHOLE_CONTEXT} for as many as the context holds"
        bad.append(FieldViolation("truncate_prompt_tokens", found))
    return bad


def _ids(text: Prompt, truncate: int | None, prompts: PromptEncoder, context: int) -> tuple[int, ...]:
    """Return a text's token ids, cut where that is asked for. Raises InvalidRequestError."""
    if truncate is None:
        if isinstance(text, TokenPrompt) and len(text.token_ids) > context:
            return text.token_ids  # which is refused by its length
        return prompts.encode(text, context=context)[0]
    most = context if truncate == _WHOLE_CONTEXT else truncate
    match text:
        case TokenPrompt(ids):
            return prompts.encode(TokenPrompt(ids[:most]), context=context)[0]
        case TextPrompt():
            return prompts.encode_cut(text, most)
        case _:
            found = "found a conversation; only texts and token ids are cut, so leave truncation out"
            raise InvalidRequestError([FieldViolation("input", found)])


def _text_violations(
    ids: tuple[int, ...], path: str, prompts: PromptEncoder, context: int
) -> list[FieldViolation]:
    if len(ids) > context:
        found = (
            f"found {len(ids)} tokens, expected at most {context}; send less, or have it cut with "
            f"truncate_prompt_tokens"
        )
        return [FieldViolation(path, found)]
    # One token more than a text may have here is room for an answer elsewhere.
    return [FieldViolation(path, each.description) for each in prompts.violations(ids, context=context + 1)]
