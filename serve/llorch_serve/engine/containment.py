"""Keeps a failure to the sequences that it is about, while the engine and everyone else's answers go on.

A call of the model that fails, for want of memory too, ends the sequences of that call. Edits of slots that
fail end the sequences whose slots were to change, and the model is not called. A failure while one sequence's
token is chosen, counted or scored ends that one. Errors of other types are faults of the engine: they are not
caught here, and end it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

from llorch_serve.engine.plan import (
    DecodeBatch,
    DraftBatch,
    PrefillChunk,
    Result,
    Sampled,
    SharedStart,
    SlotEdit,
    StepCall,
    StepPlan,
    VerifyChunk,
)
from llorch_serve.engine.runner import Chosen, Logits, Session, apply_edit, run
from llorch_serve.engine.sequence import Sequence
from llorch_serve.errors import NonFiniteLogitsError, ProviderError, ResourceError
from llorch_serve.sampling.candidates import Candidates
from llorch_serve.sampling.logprobs import score_token
from llorch_serve.sampling.sampler import SamplingRow, draw_from_few, sample_batch, sample_draft
from llorch_serve.structured.constraint import MaskThread

FAILED_CALLS: Final = (ProviderError, ResourceError, NonFiniteLogitsError, MemoryError)
"""What a session raises where a call of it, not the engine, has failed."""

_COMPLETE: Final = Sampled(complete=True)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a plan was not carried out.

    missed_edits: those that were not; none: the call failed, after all edits.
    """

    error: Exception
    missed_edits: tuple[SlotEdit, ...] = ()


def make_edits(session: Session, plan: StepPlan) -> Failure | None:
    """Make a plan's edits; return the failure of the first that fails."""
    for place, edit in enumerate(plan.edits):
        try:
            apply_edit(session, edit)
        except FAILED_CALLS as error:
            return Failure(error, plan.edits[place:])
    return None


def make_call(session: Session, plan: StepPlan) -> Logits | Chosen | Failure:
    """Make a plan's call; return what :func:`llorch_serve.engine.runner.run` does."""
    try:
        return run(session, plan.call)
    except FAILED_CALLS as error:
        return Failure(error)


def sample(call: StepCall, logits: Logits | Chosen, masks: MaskThread) -> list[Result]:
    """Return what each sequence of a call gets, and count it in the sequence's sampling state.

    masks: begins what grammars need for the next step.
    """
    if isinstance(logits, Chosen):
        assert isinstance(call, DecodeBatch)
        return _rest_chosen([row.sequence for row in call.rows], logits, masks)
    match call:
        case DecodeBatch(rows=rows):
            return _next_tokens([row.sequence for row in rows], logits, masks)
        case SharedStart(sequence=sequence):
            return _next_tokens([sequence], logits, masks)
        case VerifyChunk(sequence=sequence):
            results = [_checked_tokens(sequence, call.draft, logits)]
            _look_ahead([sequence], results, masks)
            return results
        case DraftBatch():
            raise AssertionError("guesses of a draft model are no tokens of the model")
        case PrefillChunk(sequence=sequence, scored=scored):
            if scored and (error := _score_prompt(sequence, logits[: len(scored)])) is not None:
                return [error]
            return _next_tokens([sequence], logits[len(scored) :], masks) if call.samples else [Sampled()]


def _next_tokens(sequences: Seq[Sequence], logits: Logits, masks: MaskThread) -> list[Result]:
    """Return the next token of each sequence; none where its grammar lets nothing follow.

    logits: float32 [len(sequences), vocabulary].
    """
    rows = [sequence.sampling for sequence in sequences if sequence.sampling is not None]
    results: list[Result] = [_COMPLETE] * len(rows)
    held = [row for row in rows if row.constraint is not None]
    going_on = _going_on(rows, results) if held else range(len(rows))
    if len(going_on) < len(rows):
        logits, rows = logits[going_on], [rows[index] for index in going_on]
    chosen: Seq[int | Exception]
    try:
        chosen = sample_batch(logits, rows)
    except Exception:  # noqa: BLE001 - which row it was shows when each is on its own
        chosen = _choose_one_by_one(logits, rows)
    for place, index in enumerate(going_on):
        token = chosen[place]
        if isinstance(token, Exception):
            results[index] = token
            continue
        try:
            rows[place].append(token)
            results[index] = _sampled(sequences[index], (token,), logits[place : place + 1])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this sequence's own
            results[index] = error
    if held:
        _look_ahead(sequences, results, masks)
    return results


def _rest_chosen(sequences: Seq[Sequence], found: Chosen, masks: MaskThread) -> list[Result]:
    """Return the next token of each sequence: the session's, or one drawn from candidates or from logits."""
    each = list(zip(sequences, found.token_ids, found.candidates, strict=True))
    few = [(sequence, candidates) for sequence, _, candidates in each if candidates is not None]
    left = [sequence for sequence, token_id, candidates in each if token_id is None and candidates is None]
    drawn = iter(_drawn(few))
    rest = iter(() if found.logits is None else _next_tokens(left, found.logits, masks))
    results: list[Result] = []
    for sequence, token_id, candidates in each:
        if candidates is not None:
            results.append(next(drawn))
        else:
            results.append(next(rest) if token_id is None else _counted(sequence, token_id))
    return results


def _drawn(few: Seq[tuple[Sequence, Candidates]]) -> list[Result]:
    """Return a token of each sequence without a grammar, drawn from its candidates."""
    rows = [sequence.sampling for sequence, _ in few if sequence.sampling is not None]
    candidates = [each for _, each in few]
    drawn: list[int | Exception] = []
    try:
        drawn += draw_from_few(candidates, rows)
    except Exception:  # noqa: BLE001 - which row it was shows when each is on its own
        for some, row in zip(candidates, rows, strict=True):
            try:
                drawn += draw_from_few([some], [row])
            except Exception as error:  # noqa: BLE001 - it is this row's own, and told to its caller
                drawn.append(error)
    return [
        found if isinstance(found, Exception) else _counted(sequence, found)
        for (sequence, _), found in zip(few, drawn, strict=True)
    ]


def _counted(sequence: Sequence, token_id: int) -> Result:
    """Return a token of a sequence without a grammar, and count it."""
    assert sequence.sampling is not None
    try:
        sequence.sampling.append(token_id)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this sequence's own
        return error
    return Sampled((token_id,))


def _look_ahead(sequences: Seq[Sequence], results: Seq[Result], masks: MaskThread) -> None:
    """Begin the masks of the next step, of every sequence whose grammar lets something follow."""
    constraints = [
        sequence.sampling.constraint
        for sequence, result in zip(sequences, results, strict=True)
        if isinstance(result, Sampled) and not result.complete
        if sequence.sampling is not None and sequence.sampling.constraint is not None
    ]
    if constraints:
        masks.start(constraints)


def _going_on(rows: Seq[SamplingRow], results: list[Result]) -> list[int]:
    """Return the rows whose grammar, if they have one, lets something follow; one that cannot tell gets the
    error as its result.
    """
    going_on = []
    for index, row in enumerate(rows):
        try:
            if not row.ended:
                going_on.append(index)
        except Exception as error:  # noqa: BLE001 - it is this row's own, and told to its caller
            results[index] = error
    return going_on


def _choose_one_by_one(logits: Logits, rows: Seq[SamplingRow]) -> list[int | Exception]:
    """Choose every row's token; one whose choice fails gets the error, and its neighbours do not."""
    chosen: list[int | Exception] = []
    for values, row in zip(logits, rows, strict=True):
        try:
            chosen += sample_batch(values[None], [row])
        except Exception as error:  # noqa: BLE001 - it is this row's own, and told to its caller
            chosen.append(error)
    return chosen


def _checked_tokens(sequence: Sequence, draft: Seq[int], logits: Logits) -> Result:
    """Return the tokens of a sequence whose guesses were checked; none if its grammar lets nothing follow."""
    row = sequence.sampling
    assert row is not None
    try:
        if row.ended:
            return _COMPLETE
        tokens = sample_draft(logits, row, draft)
        return tokens if isinstance(tokens, Exception) else _sampled(sequence, tokens, logits)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this sequence's own
        return error


def _score_prompt(sequence: Sequence, logits: Logits) -> Exception | None:
    """Take the log-probabilities of a prompt's tokens; return why that failed, or None."""
    assert sequence.prompt_scores is not None
    try:
        sequence.prompt_scores.take(logits)
    except Exception as error:  # noqa: BLE001 - as above
        return error
    return None


def _sampled(sequence: Sequence, token_ids: tuple[int, ...], logits: Logits) -> Sampled:
    """Return a sequence's new tokens with their log-probabilities, as the model gave them, if it asks for
    them.

    logits: float32 [at least len(token_ids), vocabulary], of which each token's row was chosen from.
    """
    row, top = sequence.sampling, sequence.logprobs
    complete = row is not None and row.constraint is not None and row.constraint.complete
    if top is None:
        return Sampled(token_ids, complete=complete)
    pairs = zip(logits, token_ids, strict=False)
    scores = tuple([score_token(values, token, top=top) for values, token in pairs])
    return Sampled(token_ids, scores, complete)
