"""From logits to a token: :func:`sample_batch` chooses the next token of every row, by :class:`ResolvedSampling`.

Logits come from the runner after each step; the chosen ids go back to the engine.

Order of operations, the one of transformers' processors and warpers: repetition penalty, ``min_tokens`` (stop
tokens masked), grammar (what it forbids is masked, whatever came before), temperature, top-k, top-p, min-p, draw. A row's draw depends on its own logits, seed and position
only, never on its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llorch_serve.errors import FieldViolation, InvalidRequestError, NonFiniteLogitsError, RequestError
from llorch_serve.sampling import ResolvedSampling
from llorch_serve.structured.constraint import Constraint

FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class SamplingRow:
    """What the sampler keeps about one sequence between steps.

    stop_ids: tokens that ``min_tokens`` forbids until then, int64 without duplicates.
    seen: bool[vocab_size], true for tokens of prompt and answer; None if nothing is penalised.
    generated: tokens generated so far, and thereby the position of the next draw.
    constraint: the grammar that the answer is held to, if any.
    """

    params: ResolvedSampling
    stop_ids: IdArray
    seen: npt.NDArray[np.bool_] | None
    generated: int = 0
    constraint: Constraint | None = None

    @classmethod
    def begin(
        cls, params: ResolvedSampling, *, prompt_ids: Sequence[int], stop_ids: Iterable[int], vocab_size: int
    ) -> SamplingRow:
        """Return the state before the first generated token. All ids must be below ``vocab_size``."""
        seen = None
        if params.repetition_penalty != 1:
            seen = np.zeros(vocab_size, dtype=np.bool_)
            seen[np.asarray(prompt_ids, dtype=np.int64)] = True
        return cls(params, np.array(sorted(set(stop_ids)), dtype=np.int64), seen)

    def append(self, token_id: int) -> None:
        """Count a generated token."""
        self.generated += 1
        if self.constraint is not None:
            self.constraint.advance(token_id)
        if self.seen is not None:
            self.seen[token_id] = True

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether the next token is simply the most likely one."""
        return (
            self.params.temperature == 0
            and self.seen is None
            and not self._masks_stops
            and self.constraint is None
        )

    @property
    def ended(self) -> bool:
        """Whether a grammar lets nothing follow, so that there is nothing to sample."""
        return self.constraint is not None and self.constraint.ended

    @property
    def _masks_stops(self) -> bool:
        return self.generated < self.params.min_tokens and self.stop_ids.size > 0


def sample_batch(logits: FloatArray, rows: Sequence[SamplingRow]) -> list[int | RequestError]:
    """Choose the next token of every row: its id, or the error that ends this row and no other.

    logits: float32 [len(rows), vocab_size]; not modified.
    """
    assert logits.ndim == 2
    assert len(logits) == len(rows)
    if all(row.is_plainly_greedy for row in rows):
        best = logits.argmax(axis=1)
        # argmax stops at the first NaN and +inf is a maximum, so that -inf alone needs a look of its own.
        finite = np.isfinite(logits[np.arange(len(rows)), best]) & np.isfinite(logits.min(axis=1))
        return [
            int(token) if ok else _non_finite(values)
            for token, ok, values in zip(best, finite, logits, strict=True)
        ]
    chosen: list[int | RequestError] = []
    for values, row in zip(logits, rows, strict=True):
        try:
            chosen.append(sample(values, row))
        except RequestError as error:
            chosen.append(error)
    return chosen


def sample_draft(
    logits: FloatArray, row: SamplingRow, draft: Sequence[int]
) -> tuple[int, ...] | RequestError:
    """Choose the tokens that follow, as long as they are the guessed ones, and one more; at least one.

    logits: float32 [len(draft) + 1, vocab_size], after the sequence's last token and after each guess. Every token is
    drawn from its own logits, seed and position, exactly as without a guess: a guess only decides how many logits are
    of use. The tokens are counted in ``row``. Returns the error instead where the first choice already fails.
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


def sample(logits: FloatArray, row: SamplingRow) -> int:
    """Choose the next token of one row from float32 logits [vocab_size], which are not modified.

    Raises NonFiniteLogitsError, or InvalidRequestError if ``min_tokens`` and the grammar forbid the whole vocabulary.
    """
    ids, weights = distribution(logits, row)
    if len(ids) == 1:
        return int(ids[0])
    cumulative = weights.cumsum(dtype=np.float64)
    # Never past the end: uniform < 1, and rounding cannot lift the product to the last sum.
    target = uniform(row.params.seed, row.generated) * cumulative[-1]
    return int(ids[cumulative.searchsorted(target, side="right")])


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1), a multiple of 2**-53, that belongs to a seed and a position.

    Philox is counter-based (Salmon et al. 2011), so that no state is carried from step to step.
    """
    return (int(np.random.Philox(key=seed, counter=position).random_raw()) >> 11) * 2.0**-53


def distribution(logits: FloatArray, row: SamplingRow) -> tuple[IdArray, FloatArray]:
    """Return the ids that may be drawn, ascending, and their weights: float32, not normalised, the largest is 1.

    Raises what :func:`sample` raises.
    """
    if not (np.isfinite(logits.max()) and np.isfinite(logits.min())):
        raise _non_finite(logits)
    params = row.params
    scores = _processed(logits, row)
    if params.temperature == 0:
        return np.array([scores.argmax()]), np.ones(1, dtype=np.float32)
    ids = np.arange(len(scores))
    if 0 < params.top_k < len(scores):
        ids = np.flatnonzero(scores >= _kth_largest(scores, params.top_k))
        scores = scores[ids]
    # Below the smallest normal float32 the division would be by zero; there it picks the maximum, as it should.
    temperature = max(params.temperature, float(np.finfo(np.float32).tiny))
    with np.errstate(over="ignore"):
        weights = np.exp((scores - scores.max()) / np.float32(temperature))
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
    if params.min_p > 0:
        kept = np.flatnonzero(weights >= params.min_p)
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def _processed(logits: FloatArray, row: SamplingRow) -> FloatArray:
    """Return logits after repetition penalty, ``min_tokens`` and grammar: the same array if none applies."""
    if row.seen is None and not row._masks_stops and row.constraint is None:
        return logits
    scores = logits.copy()
    if row.seen is not None:
        seen = np.flatnonzero(row.seen)
        values = scores[seen].astype(np.float64)
        penalty = row.params.repetition_penalty
        with np.errstate(over="ignore"):
            values = np.where(values < 0, values * penalty, values / penalty)
        # A penalty near 0 would make them infinite; the largest float32 is as certain and stays a number.
        limit = float(np.finfo(np.float32).max)
        scores[seen] = values.clip(-limit, limit)
    if row._masks_stops:
        scores[row.stop_ids] = -np.inf
    if row.constraint is not None:
        np.copyto(scores, -np.inf, where=row.constraint.forbidden())
    if row._masks_stops and np.isneginf(scores.max()):
        found = f"found {row.params.min_tokens} where only stop tokens may follow, expected 0"
        raise InvalidRequestError([FieldViolation("sampling.min_tokens", found)])
    return scores


def _kth_largest(scores: FloatArray, k: int) -> np.float32:
    """Return the k-th largest score. Tokens that tie with it are kept by the caller, as transformers does."""
    columns = len(scores) // 32
    if k <= columns:
        # Each column's maximum is a score of its own, so at least k scores reach the k-th largest maximum:
        # what lies below it is out, and a partition of the few that remain is far cheaper.
        maxima = scores[: columns * 32].reshape(32, columns).max(axis=0)
        scores = scores[scores >= np.partition(maxima, columns - k)[columns - k]]
    return np.float32(np.partition(scores, len(scores) - k)[len(scores) - k])


def _nucleus(weights: FloatArray, top_p: float) -> IdArray:
    """Return the indices, ascending, of the fewest weights whose share reaches ``top_p``; ties: lower index first.

    A sort of the whole vocabulary would take milliseconds. The upper half of a non-negative float32's bits orders
    it as the number does, so sums over these 16257 bins find the bin at the edge, and only that one is sorted.
    """
    bins = weights.view(np.int32) >> 16
    mass = np.bincount(bins, weights=weights)
    from_top = mass[::-1].cumsum()
    target = top_p * from_top[-1]
    rank = int((from_top >= target).argmax())
    edge = len(mass) - 1 - rank
    inside = np.flatnonzero(bins == edge)
    inside = inside[np.argsort(-weights[inside], kind="stable")]
    above = from_top[rank - 1] if rank > 0 else 0.0
    reached = above + weights[inside].cumsum(dtype=np.float64) >= target
    # Rounding may leave the last sum a hair short of the target; then the whole bin is in.
    count = int(reached.argmax()) + 1 if reached.any() else len(inside)
    kept = bins > edge
    kept[inside[:count]] = True
    return np.flatnonzero(kept)


def _non_finite(logits: FloatArray) -> NonFiniteLogitsError:
    count = int(len(logits) - np.isfinite(logits).sum())
    return NonFiniteLogitsError(
        f"the model gave {count} logits of {len(logits)} that are not finite; expected none. "
        "Run llorch verify on the artifact, or export it in fp32 or, for a provider that has it, bf16."
    )
