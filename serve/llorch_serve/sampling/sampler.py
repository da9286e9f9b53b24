"""From logits to a token: :func:`sample_batch` chooses the next token of every row, by
:class:`ResolvedSampling`.

Logits come from the runner after each step; the chosen ids go back to the engine. The order of operations is
that of transformers' processors and warpers, and docs/generation.md states it: PROCESSORS of
``processors.py``, the grammar's mask, temperature, FILTERS of ``filters.py`` (after ``candidates.py`` has
left out most tokens), the draw.

A row's draw depends on its own logits, seed and position only, bit for bit, never on its neighbours in the
batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_serve.errors import FieldViolation, InvalidRequestError, NonFiniteLogitsError, RequestError
from llorch_serve.sampling.candidates import Candidates, find_candidates
from llorch_serve.sampling.drawable import DrawableIds
from llorch_serve.sampling.draws import Draws
from llorch_serve.sampling.filters import FEW, Table, filter_few, filter_many
from llorch_serve.sampling.greedy import accepts, takes_best
from llorch_serve.sampling.params import ResolvedSampling
from llorch_serve.sampling.processors import Processor, begin, process
from llorch_serve.sampling.selection import FloatArray, IdArray, Values
from llorch_serve.structured.constraint import Constraint

_LINES: Final = 64  # a row that is drawn from as a whole is summed in so many lines


@dataclass(slots=True)
class SamplingRow:
    """What the sampler keeps about one sequence between steps.

    processors: those that its settings ask for, in their order.
    constraint: the grammar that the answer is held to, if any.
    generated: tokens generated so far, and thereby the position of the next draw.
    told: the first of those, where the answer goes on from tokens of another process.
    forced: what the first generated tokens are, whatever their logits: they have been told in another process
        and are computed again.
    drawable: the ids that stand for a token of the tokenizer; no other is chosen. None: all do.
    """

    params: ResolvedSampling
    processors: tuple[Processor, ...]
    draws: Draws
    constraint: Constraint | None = None
    generated: int = 0
    drawable: DrawableIds | None = None
    told: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()

    @classmethod
    def begin(
        cls,
        params: ResolvedSampling,
        *,
        prompt_ids: Sequence[int],
        stop_ids: Iterable[int],
        drawable: DrawableIds | None = None,
        told: tuple[int, ...] = (),
    ) -> SamplingRow:
        """Return the state before the first generated token, or behind those that have been ``told``. All
        ids must be inside the vocabulary.
        """
        processors = begin(params, prompt_ids, frozenset(stop_ids))
        row = cls(params, processors, Draws(params.seed), drawable=drawable, told=told)
        for token_id in told:
            row.append(token_id)
        return row

    def append(self, token_id: int) -> None:
        """Count a generated token."""
        self.generated += 1
        for processor in self.processors:
            processor.append(token_id)
        if self.constraint is not None:
            self.constraint.advance(token_id)

    def hold_to(self, constraint: Constraint) -> None:
        """Hold the answer to a grammar, before its first token here: it may take longer to compile than the
        rest of the request.
        """
        assert self.generated == len(self.told)
        for token_id in self.told:
            constraint.advance(token_id)
        self.constraint = constraint

    @property
    def ended(self) -> bool:
        """Whether a grammar lets nothing follow, so that there is nothing to sample."""
        return self.constraint is not None and self.constraint.ended


def sample_batch(logits: FloatArray, rows: Sequence[SamplingRow]) -> list[int | RequestError]:
    """Choose the next token of every row: its id, or the error that ends this row and no other.

    logits: float32 [len(rows), vocab_size]; not modified.
    """
    assert logits.ndim == 2
    assert len(logits) == len(rows)
    chosen: list[int | RequestError] = []
    rest = []
    # One by one, as a step of the model leaves nothing in the processor's caches: the second look at a row
    # then finds it there.
    for index, (values, row) in enumerate(zip(logits, rows, strict=True)):
        if row.generated < len(row.forced):
            chosen.append(row.forced[row.generated])
            continue
        best = int(values.argmax())
        # argmax stops at the first NaN and +inf is a maximum, so that -inf alone needs a look of its own.
        if not (isfinite(values.item(best)) and isfinite(values.min())):
            chosen.append(_non_finite(values))
            continue
        # Where nothing applies to a greedy row, the most likely token is it.
        chosen.append(best)
        if not (takes_best(row) and accepts(row, best)):
            rest.append(index)
    if rest:
        chosen_from = logits if len(rest) == len(rows) else logits[rest]
        for index, token in zip(rest, _choose(chosen_from, [rows[i] for i in rest]), strict=True):
            chosen[index] = token
    return chosen


def sample_draft(
    logits: FloatArray, row: SamplingRow, draft: Sequence[int]
) -> tuple[int, ...] | RequestError:
    """Choose the tokens that follow, as long as they are the guessed ones, and one more; at least one.

    logits: float32 [len(draft) + 1, vocab_size], after the sequence's last token and after each guess. Every
        token is
    drawn from its own logits, seed and position, exactly as without a guess: a guess only decides how many
    logits are of use. The tokens are counted in ``row``. Returns the error instead where the first choice
    already fails.
    """
    chosen: list[int] = []
    for values, guess in zip(logits, (*draft, None), strict=True):
        (token,) = sample_batch(values[None], [row])
        if isinstance(token, RequestError):
            return tuple(chosen) if chosen else token  # what fails here fails again, and is told then
        row.append(token)
        chosen.append(token)
        if token != guess or row.ended:
            break
    return tuple(chosen)


def distribution(logits: FloatArray, row: SamplingRow) -> tuple[IdArray, Values]:
    """Return the ids that may be drawn for one row, and their weights, not normalised.

    logits: float32 [vocab_size], finite. Raises InvalidRequestError if ``min_tokens`` and the grammar forbid
        the whole vocabulary.
    """
    scores = _allowed(process(logits[None], [row.processors])[0], row)
    if np.isneginf(scores.max()):
        raise _hopeless(row)
    if row.params.temperature == 0:
        return np.array([scores.argmax()]), np.ones(1)
    candidates = find_candidates(scores, row.params)
    if len(candidates) <= FEW and candidates.ids is not None:
        table = filter_few([candidates], [row.params])
        ids, weights = table.ids[0], table.weights[0]
    else:
        found, many = filter_many(candidates, row.params)
        ids, weights = np.arange(len(scores)) if found is None else found, many.astype(np.float64)
    return ids[weights > 0], weights[weights > 0]


def _allowed(scores: FloatArray, row: SamplingRow) -> FloatArray:
    """Return the scores with those of tokens that the row's grammar forbids at -inf, without those of ids
    that stand for no token. Raises what the grammar does.
    """
    if row.constraint is not None:
        scores = np.where(row.constraint.forbidden(), np.float32(-np.inf), scores)
    return scores if row.drawable is None else row.drawable.only(scores)


def _choose(logits: FloatArray, rows: Sequence[SamplingRow]) -> list[int | RequestError]:
    """Choose the next token of rows of finite logits that need more than a look for the largest."""
    chosen: list[int | RequestError] = [0] * len(rows)
    few: list[tuple[int, Candidates]] = []
    for index, (scores, row) in enumerate(
        zip(process(logits, [r.processors for r in rows]), rows, strict=True)
    ):
        try:
            scores = _allowed(scores, row)
        except RequestError as error:
            chosen[index] = error
            continue
        if row.generated < row.params.min_tokens and np.isneginf(scores.max()):
            chosen[index] = _hopeless(row)
        elif row.params.temperature == 0:
            chosen[index] = int(scores.argmax())
        else:
            candidates = find_candidates(scores, row.params)
            if candidates.ids is not None and len(candidates) <= FEW:
                few.append((index, candidates))
            else:
                ids, weights = filter_many(candidates, row.params)
                place = _draw_from_many(weights, row.draws.at(row.generated))
                chosen[index] = place if ids is None else int(ids[place])
    drawn = draw_from_few([candidates for _, candidates in few], [rows[index] for index, _ in few])
    for (index, _), token in zip(few, drawn, strict=True):
        chosen[index] = token
    return chosen


def draw_from_few(found: Sequence[Candidates], rows: Sequence[SamplingRow]) -> list[int]:
    """Draw the next token of each row from at most FEW candidates."""
    chosen = [0] * len(rows)
    # Tables of rows by the number of binary digits of how many candidates they have: rows of one table are of
    # like length.
    tables: defaultdict[int, list[int]] = defaultdict(list)
    for index, candidates in enumerate(found):
        tables[len(candidates).bit_length()].append(index)
    for places in tables.values():
        table = filter_few([found[i] for i in places], [rows[i].params for i in places])
        numbers = [rows[i].draws.at(rows[i].generated) for i in places]
        for index, token in zip(places, _draw_from_table(table, numbers), strict=True):
            chosen[index] = token
    return chosen


def _draw_from_table(table: Table, numbers: Sequence[float]) -> list[int]:
    """Draw one token of each row, by its number in [0, 1)."""
    sums = table.weights.cumsum(axis=1)
    # Never past the end: a number is at most 1 - 2**-53, and rounding cannot lift the product to the last
    # sum.
    targets = np.array(numbers) * sums[:, -1]
    places = (sums <= targets[:, None]).sum(axis=1)
    found: list[int] = table.ids[np.arange(len(places)), places].tolist()
    return found


def _draw_from_many(weights: FloatArray, number: float) -> int:
    """Return the index that a number in [0, 1) falls on, where each has the share of its weight.

    A running sum over a whole vocabulary is the slowest part of a draw: here the weights are lines below each
    other, a column is drawn by the columns' sums, and then one of its weights.
    """
    columns = len(weights) // _LINES
    lines = weights[: columns * _LINES].reshape(_LINES, columns)
    tail = weights[columns * _LINES :]
    sums = np.concatenate([lines.sum(axis=0, dtype=np.float64), tail]).cumsum()
    target = number * sums[-1]
    column = int(sums.searchsorted(target, side="right"))
    if column >= columns:
        return columns * _LINES + column - columns
    below = sums[column - 1] if column > 0 else 0.0
    inside = below + lines[:, column].cumsum(dtype=np.float64)
    # Added in another order, the sums may end a hair below the column's; then it is the last weight that
    # counts.
    line = min(int(inside.searchsorted(target, side="right")), int(np.flatnonzero(lines[:, column])[-1]))
    return line * columns + column


def _hopeless(row: SamplingRow) -> InvalidRequestError:
    found = f"found {row.params.min_tokens} where only stop tokens may follow, expected 0"
    return InvalidRequestError([FieldViolation("sampling.min_tokens", found)])


def _non_finite(logits: npt.NDArray[np.float32]) -> NonFiniteLogitsError:
    count = int(len(logits) - np.isfinite(logits).sum())
    return NonFiniteLogitsError(
        f"the model gave {count} logits of {len(logits)} that are not finite; expected none. "
        "Run llorch verify on the artifact, or export it in fp32 or, for a provider that has it, bf16."
    )
