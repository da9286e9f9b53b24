"""From logits to a token: :class:`SamplingParams` says how, :func:`sample_batch` does it.

Parameters come from a request, already in Python types; :func:`resolve` fills the gaps with the artifact's defaults.
Logits come from the runner after each step, and the chosen ids go back to the engine.

Order of operations, the one of transformers' processors and warpers: repetition penalty, ``min_tokens`` (stop
tokens masked), temperature, top-k, top-p, min-p, draw. A row's draw depends on its own logits, seed and position
only, never on its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from llorch_serve.artifact import GenerationDefaults
from llorch_serve.errors import (
    ArtifactError,
    FieldViolation,
    InvalidRequestError,
    NonFiniteLogitsError,
    RequestError,
)

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_SEED = 2**63 - 1
MAX_LISTED_IDS = 16  # bad stop_token_ids that are named one by one; a status message has room for few

FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. None means: the artifact's default, else the neutral value.

    temperature: 0..2; 0 is greedy.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: (0, 1]; keep the smallest set of tokens whose probability reaches p.
    min_p: 0..1; drop tokens less likely than min_p times the most likely one.
    repetition_penalty: (0, 2]; logits of tokens already in prompt or answer are divided by it when positive and
        multiplied when negative (Keskar et al. 2019).
    seed: 0..2**63-1; absent: drawn at random and reported.
    max_tokens: most tokens to generate; absent: until the context is full.
    min_tokens: stop tokens are impossible before so many tokens.
    stop: strings that end generation and are not part of the text.
    stop_token_ids: further tokens that end generation.
    ignore_eos: the model's own stop tokens do not end generation.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def violations(self, *, vocab_size: int, prefix: str = "sampling") -> list[FieldViolation]:
        """Return every field that is out of range; empty if all is well."""
        bad: list[FieldViolation] = []

        def check(name: str, value: object, ok: bool, accepted: str) -> None:
            if not ok:
                bad.append(FieldViolation(f"{prefix}.{name}", f"found {value!r}, expected {accepted}"))

        def in_range(value: float | None, low: float, high: float, *, open_low: bool = False) -> bool:
            if value is None:
                return True
            # NaN fails every comparison, so it is out of range too.
            return (value > low if open_low else value >= low) and value <= high

        check("temperature", self.temperature, in_range(self.temperature, 0, 2), "a number from 0 to 2")
        check("top_k", self.top_k, self.top_k is None or self.top_k >= 0, "an integer of at least 0")
        check(
            "top_p", self.top_p, in_range(self.top_p, 0, 1, open_low=True), "a number above 0 and at most 1"
        )
        check("min_p", self.min_p, in_range(self.min_p, 0, 1), "a number from 0 to 1")
        check(
            "repetition_penalty",
            self.repetition_penalty,
            in_range(self.repetition_penalty, 0, 2, open_low=True),
            "a number above 0 and at most 2",
        )
        check("seed", self.seed, in_range(self.seed, 0, MAX_SEED), f"an integer from 0 to {MAX_SEED}")
        check(
            "max_tokens",
            self.max_tokens,
            self.max_tokens is None or self.max_tokens >= 0,
            "an integer of at least 0",
        )
        check("min_tokens", self.min_tokens, self.min_tokens >= 0, "an integer of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens >= 0:
            check("min_tokens", self.min_tokens, False, f"at most max_tokens ({self.max_tokens})")
        check(
            "stop",
            f"{len(self.stop)} strings",
            len(self.stop) <= MAX_STOP_STRINGS,
            f"at most {MAX_STOP_STRINGS} strings",
        )
        for index, text in enumerate(self.stop[:MAX_STOP_STRINGS]):
            size = len(text.encode("utf-8", "surrogatepass"))
            check(
                f"stop[{index}]", f"{size} bytes", 0 < size <= MAX_STOP_BYTES, f"1 to {MAX_STOP_BYTES} bytes"
            )
            check(f"stop[{index}]", text, not _has_surrogate(text), "text without lone surrogates")
        bad_ids = [(i, token) for i, token in enumerate(self.stop_token_ids) if not 0 <= token < vocab_size]
        accepted = f"an id of the vocabulary, 0 to {vocab_size - 1}"
        for index, token in bad_ids[:MAX_LISTED_IDS]:
            check(f"stop_token_ids[{index}]", token, False, accepted)
        if len(bad_ids) > MAX_LISTED_IDS:
            check("stop_token_ids", f"{len(bad_ids) - MAX_LISTED_IDS} more", False, accepted)
        return bad


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """Sampling values with nothing left open. Ranges and meanings are those of :class:`SamplingParams`.

    temperature: 0 is greedy.  top_k: 0 is off.  top_p, repetition_penalty: 1 is off.  min_p: 0 is off.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    min_tokens: int
    seed: int


def resolve(
    params: SamplingParams, defaults: GenerationDefaults, draw_seed: Callable[[], int]
) -> ResolvedSampling:
    """Return the request's value, else the artifact's default, else the neutral value, for every field.

    Without any temperature the answer is greedy. ``draw_seed`` is called only if the request names no seed.
    """
    return ResolvedSampling(
        temperature=_first(params.temperature, defaults.temperature, 0.0),
        top_k=_first(params.top_k, defaults.top_k, 0),
        top_p=_first(params.top_p, defaults.top_p, 1.0),
        min_p=_first(params.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(params.repetition_penalty, defaults.repetition_penalty, 1.0),
        min_tokens=params.min_tokens,
        seed=draw_seed() if params.seed is None else params.seed,
    )


def _first(asked: Number | None, default: Number | None, neutral: Number) -> Number:
    if asked is not None:
        return asked
    return neutral if default is None else default


def check_defaults(defaults: GenerationDefaults) -> None:
    """Raise ArtifactError if an artifact recommends values that no request may ask for."""
    params = SamplingParams(
        temperature=defaults.temperature,
        top_k=defaults.top_k,
        top_p=defaults.top_p,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
    )
    bad = params.violations(vocab_size=1, prefix="generation")
    if bad:
        found = "; ".join(f"{v.field}: {v.description}" for v in bad)
        raise ArtifactError(
            f"the manifest's generation defaults are unusable: {found}. Export the model again."
        )


@dataclass(slots=True)
class SamplingRow:
    """What the sampler keeps about one sequence between steps.

    stop_ids: tokens that ``min_tokens`` forbids until then, int64 without duplicates.
    seen: bool[vocab_size], true for tokens of prompt and answer; None if nothing is penalised.
    generated: tokens generated so far, and thereby the position of the next draw.
    """

    params: ResolvedSampling
    stop_ids: IdArray
    seen: npt.NDArray[np.bool_] | None
    generated: int = 0

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
        if self.seen is not None:
            self.seen[token_id] = True

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether the next token is simply the most likely one."""
        return self.params.temperature == 0 and self.seen is None and not self._masks_stops

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


def sample(logits: FloatArray, row: SamplingRow) -> int:
    """Choose the next token of one row from float32 logits [vocab_size], which are not modified.

    Raises NonFiniteLogitsError, or InvalidRequestError if ``min_tokens`` forbids the whole vocabulary.
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
    """Return logits after repetition penalty and ``min_tokens``: the same array if neither applies."""
    if row.seen is None and not row._masks_stops:
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
        if np.isneginf(scores.max()):
            found = f"found {row.params.min_tokens} where every token is a stop token, expected 0"
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
        "Run llorch verify on the artifact, or export it in a higher precision."
    )
