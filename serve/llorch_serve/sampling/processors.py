"""What changes logits before temperature: bias, penalties, and the stop tokens that ``min_tokens`` forbids.

:data:`PROCESSORS` lists them in the order in which they are applied. Input is a batch of logits as the model
gave them and the processors of each row; output a row of scores for each, which is the model's own row where
nothing applies. Few logits of a row are touched, so the rows of a batch share each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

import numpy as np

from llorch_serve.sampling.counts import TokenCounts
from llorch_serve.sampling.params import ResolvedSampling
from llorch_serve.sampling.selection import FloatArray, IdArray, Values

_LIMIT: Final = float(np.finfo(np.float32).max)


class Processor(Protocol):
    """One change of logits, and what it keeps about one row. A new one is a class like those below, in
    :data:`PROCESSORS`.
    """

    @property
    def applies(self) -> bool:
        """Whether it changes the next logits."""

    @classmethod
    def begin(
        cls, params: ResolvedSampling, prompt_ids: Sequence[int], stop_ids: frozenset[int]
    ) -> Self | None:
        """Return the state before the first generated token; None if the row's settings leave it off."""

    def append(self, token_id: int) -> None:
        """Count a generated token."""

    @staticmethod
    def change(scores: FloatArray, rows: Sequence[tuple[int, Any]]) -> None:
        """Change scores [rows, vocabulary] in place, in those rows whose index is given with their state."""


@dataclass(slots=True)
class LogitBias:
    """Adds ``bias`` to the logits of ``ids``."""

    ids: IdArray
    bias: Values
    applies: bool = True

    @classmethod
    def begin(
        cls, params: ResolvedSampling, prompt_ids: Sequence[int], stop_ids: frozenset[int]
    ) -> Self | None:
        """Return it if there is any bias."""
        if not params.logit_bias:
            return None
        ids = np.array(list(params.logit_bias), dtype=np.int64)
        return cls(ids, np.array(list(params.logit_bias.values()), dtype=np.float64))

    def append(self, token_id: int) -> None:
        """Do nothing: the bias is the same for every token."""

    @staticmethod
    def change(scores: FloatArray, rows: Sequence[tuple[int, LogitBias]]) -> None:
        """Add."""
        _edit(scores, [(index, state.ids, state.bias) for index, state in rows], np.add)


@dataclass(slots=True)
class RepetitionPenalty:
    """Makes tokens of prompt and answer less likely by a penalty above 1: a logit below 0 is multiplied by
    it, any other divided (Keskar et al. 2019).
    """

    penalty: float
    seen: TokenCounts
    applies: bool = True

    @classmethod
    def begin(
        cls, params: ResolvedSampling, prompt_ids: Sequence[int], stop_ids: frozenset[int]
    ) -> Self | None:
        """Return it if the penalty is not 1."""
        if params.repetition_penalty == 1:
            return None
        return cls(params.repetition_penalty, TokenCounts(prompt_ids, window=_window(params)))

    def append(self, token_id: int) -> None:
        """Count the token."""
        self.seen.append(token_id)

    @staticmethod
    def change(scores: FloatArray, rows: Sequence[tuple[int, RepetitionPenalty]]) -> None:
        """Multiply or divide."""
        edits = [(i, state.seen.ids, np.full(len(state.seen.ids), state.penalty)) for i, state in rows]
        _edit(scores, edits, _penalised)


@dataclass(slots=True)
class FrequencyAndPresencePenalty:
    """Takes from a token's logit ``frequency`` as often as the answer has the token, and ``presence`` once if
    it has.
    """

    frequency: float
    presence: float
    generated: TokenCounts
    applies: bool = True

    @classmethod
    def begin(
        cls, params: ResolvedSampling, prompt_ids: Sequence[int], stop_ids: frozenset[int]
    ) -> Self | None:
        """Return it if one of the penalties is not 0."""
        if params.presence_penalty == 0 and params.frequency_penalty == 0:
            return None
        return cls(params.frequency_penalty, params.presence_penalty, TokenCounts(window=_window(params)))

    def append(self, token_id: int) -> None:
        """Count the token."""
        self.generated.append(token_id)

    @staticmethod
    def change(scores: FloatArray, rows: Sequence[tuple[int, FrequencyAndPresencePenalty]]) -> None:
        """Subtract."""
        edits = [
            (
                index,
                state.generated.ids,
                state.frequency * state.generated.counts.astype(np.float64) + state.presence,
            )
            for index, state in rows
        ]
        _edit(scores, edits, np.subtract)


@dataclass(slots=True)
class MinTokens:
    """Makes stop tokens impossible before so many tokens. left: tokens until then."""

    stop_ids: IdArray
    left: int
    applies: bool = True

    @classmethod
    def begin(
        cls, params: ResolvedSampling, prompt_ids: Sequence[int], stop_ids: frozenset[int]
    ) -> Self | None:
        """Return it if a minimum is asked for and anything stops the row."""
        if params.min_tokens == 0 or not stop_ids:
            return None
        return cls(np.array(sorted(stop_ids), dtype=np.int64), params.min_tokens)

    def append(self, token_id: int) -> None:
        """Count the token."""
        self.left -= 1
        self.applies = self.left > 0

    @staticmethod
    def change(scores: FloatArray, rows: Sequence[tuple[int, MinTokens]]) -> None:
        """Set to -inf."""
        for index, state in rows:
            scores[index, state.stop_ids] = -np.inf


PROCESSORS: Final[tuple[type[Processor], ...]] = (
    LogitBias,
    RepetitionPenalty,
    FrequencyAndPresencePenalty,
    MinTokens,
)
"""All of them, in the order in which they are applied. The grammar's mask, the temperature, the filters of
``filters.py`` and the draw follow.
"""


def begin(
    params: ResolvedSampling, prompt_ids: Sequence[int], stop_ids: frozenset[int]
) -> tuple[Processor, ...]:
    """Return the processors of a row, in their order; none if its logits are used as they are."""
    states = [kind.begin(params, prompt_ids, stop_ids) for kind in PROCESSORS]
    return tuple(state for state in states if state is not None)


def applying(row: tuple[Processor, ...]) -> list[Processor]:
    """Return those of a row's processors that change its next logits."""
    return [state for state in row if state.applies]


def process(logits: FloatArray, rows: Sequence[tuple[Processor, ...]]) -> list[FloatArray]:
    """Return the scores of every row, float32 [vocabulary]; a view of ``logits`` where nothing applies to it.

    logits: float32 [len(rows), vocabulary], all finite; not modified. Scores of forbidden tokens are -inf,
        all others finite.
    """
    scores = list(logits)
    states = [applying(row) for row in rows]
    changed = [index for index, row in enumerate(states) if row]
    if not changed:
        return scores
    copies = logits[changed]
    entries = [(place, state) for place, index in enumerate(changed) for state in states[index]]
    for kind in PROCESSORS:
        if own := [entry for entry in entries if type(entry[1]) is kind]:
            kind.change(copies, own)
    for index, values in zip(changed, copies, strict=True):
        scores[index] = values
    return scores


def _window(params: ResolvedSampling) -> int | None:
    """Return how many of the last tokens penalties look at; None: all."""
    return None if params.repeat_last_n < 0 else params.repeat_last_n


def _penalised(values: Values, penalty: Values) -> Values:
    with np.errstate(over="ignore"):
        return np.where(values < 0, values * penalty, values / penalty)


def _edit(
    scores: FloatArray,
    edits: Sequence[tuple[int, IdArray, Values]],
    change: Callable[[Values, Values], Values],
) -> None:
    """Give ``change`` the scores at some ids of some rows, in float64, with a number for each, and store what
    it returns.
    """
    places = np.concatenate([index * scores.shape[1] + ids for index, ids, _ in edits])
    flat = scores.reshape(-1)
    values = change(flat[places].astype(np.float64), np.concatenate([numbers for _, _, numbers in edits]))
    # A penalty near 0 would make them infinite; the largest float32 is as certain and stays a number.
    flat[places] = values.clip(-_LIMIT, _LIMIT)
