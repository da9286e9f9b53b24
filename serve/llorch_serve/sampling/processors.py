"""What changes logits before temperature: bias, penalties, and the stop tokens that ``min_tokens`` forbids.

Input is a batch of logits as the model gave them and the state of each row; output a row of scores for each,
which is the model's own row where nothing applies. Few logits of a row are touched, so the rows of a batch
share each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from llorch_serve.sampling.counts import TokenCounts
from llorch_serve.sampling.params import ResolvedSampling
from llorch_serve.sampling.selection import FloatArray, IdArray, Values

_LIMIT: Final = float(np.finfo(np.float32).max)


@dataclass(slots=True)
class Adjustment:
    """What changes one row's logits.

    stop_ids: tokens that ``min_tokens`` forbids until then, without duplicates.
    bias_ids, bias: tokens whose logits are raised, and by how much.
    seen: tokens of prompt and answer in the window; None if ``repetition_penalty`` is off.
    said: tokens of the answer in the window; None if presence and frequency penalty are off.
    generated: tokens generated so far.
    """

    params: ResolvedSampling
    stop_ids: IdArray
    bias_ids: IdArray
    bias: Values
    seen: TokenCounts | None
    said: TokenCounts | None
    generated: int = 0

    @classmethod
    def begin(
        cls, params: ResolvedSampling, prompt_ids: Sequence[int], stop_ids: frozenset[int]
    ) -> Adjustment:
        """Return the state before the first generated token."""
        window = None if params.repeat_last_n < 0 else params.repeat_last_n
        penalised = params.presence_penalty != 0 or params.frequency_penalty != 0
        return cls(
            params=params,
            stop_ids=np.array(sorted(stop_ids), dtype=np.int64),
            bias_ids=np.array(list(params.logit_bias), dtype=np.int64),
            bias=np.array(list(params.logit_bias.values()), dtype=np.float64),
            seen=TokenCounts(prompt_ids, window=window) if params.repetition_penalty != 1 else None,
            said=TokenCounts(window=window) if penalised else None,
        )

    def append(self, token_id: int) -> None:
        """Count a generated token."""
        self.generated += 1
        for counts in (self.seen, self.said):
            if counts is not None:
                counts.append(token_id)

    @property
    def applies(self) -> bool:
        """Whether the next logits are not used as they are."""
        return self.masks_stops or self.bias_ids.size > 0 or self.seen is not None or self.said is not None

    @property
    def masks_stops(self) -> bool:
        """Whether stop tokens are impossible for now."""
        return self.generated < self.params.min_tokens and self.stop_ids.size > 0


def adjusted(logits: FloatArray, rows: Sequence[Adjustment]) -> list[FloatArray]:
    """Return the scores of every row, float32 [vocabulary]; a view of ``logits`` where nothing applies to it.

    logits: float32 [len(rows), vocabulary], all finite; not modified. Scores of forbidden tokens are -inf,
        all others
    finite.
    """
    changed = [index for index, row in enumerate(rows) if row.applies]
    scores = list(logits)
    if changed:
        copies = logits[changed]
        _change(copies, [rows[index] for index in changed])
        for index, values in zip(changed, copies, strict=True):
            scores[index] = values
    return scores


def _change(scores: FloatArray, rows: Sequence[Adjustment]) -> None:
    """Apply, in this order: bias, repetition penalty, frequency and presence penalty, forbidden stop
    tokens.
    """
    _edit(scores, [(i, row.bias_ids, row.bias) for i, row in enumerate(rows) if row.bias_ids.size], np.add)
    _edit(
        scores,
        [
            (i, row.seen.ids, _filled(row.seen, row.params.repetition_penalty))
            for i, row in enumerate(rows)
            if row.seen is not None
        ],
        _penalised,
    )
    _edit(
        scores,
        [
            (i, row.said.ids, _taken(row.said, row.params))
            for i, row in enumerate(rows)
            if row.said is not None
        ],
        np.subtract,
    )
    for index, row in enumerate(rows):
        if row.masks_stops:
            scores[index, row.stop_ids] = -np.inf


def _filled(counts: TokenCounts, value: float) -> Values:
    return np.full(len(counts.ids), value)


def _taken(said: TokenCounts, params: ResolvedSampling) -> Values:
    """Return what frequency and presence penalty take from the logit of each token of the answer."""
    counts = said.counts.astype(np.float64)
    return params.frequency_penalty * counts + params.presence_penalty


def _penalised(values: Values, penalty: Values) -> Values:
    """Make each value less likely by a penalty above 1: one below 0 is multiplied by it, any other
    divided.
    """
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
    if not edits:
        return
    places = np.concatenate([index * scores.shape[1] + ids for index, ids, _ in edits])
    flat = scores.reshape(-1)
    values = change(flat[places].astype(np.float64), np.concatenate([numbers for _, _, numbers in edits]))
    # A penalty near 0 would make them infinite; the largest float32 is as certain and stays a number.
    flat[places] = values.clip(-_LIMIT, _LIMIT)
