"""What a request may ask of sampling, in ranges that are checked, with gaps filled by the artifact's
defaults.

Input comes from the command line or gRPC; :class:`ResolvedSampling` goes to ``sampler.py``, which does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from llorch_serve.artifact.manifest import GenerationDefaults
from llorch_serve.errors import ArtifactError, FieldViolation
from llorch_serve.sampling.logprobs import MAX_LOGPROBS
from llorch_serve.structured import spec
from llorch_serve.structured.spec import Structured

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_SEED = 2**63 - 1
MAX_BIASED_IDS = 1024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_WINDOW = 2**31 - 1
MAX_LISTED_IDS = 16  # bad ids of a field that are named one by one; a status message has room for few

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. None means: the artifact's default, else the neutral
    value.

    temperature: 0..2; 0 is greedy.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: (0, 1]; keep the smallest set of tokens whose probability reaches p.
    min_p: 0..1; drop tokens less likely than min_p times the most likely one.
    typical_p: (0, 1]; keep the smallest set of tokens that reaches p, of those whose surprise is nearest to
        what is expected (Meister et al. 2023).
    repetition_penalty: (0, 2]; logits of tokens already in prompt or answer are divided by it when positive
        and multiplied when negative (Keskar et al. 2019).
    presence_penalty: -2..2; taken from the logit of each token that is in the answer.
    frequency_penalty: -2..2; taken from a token's logit as often as the token is in the answer.
    repeat_last_n: how many of the last tokens, prompt and answer together, the three penalties look at; -1:
        all, 0: none.
    logit_bias: what is added to the logits of some ids, -100..100.
    seed: 0..2**63-1; absent: drawn at random and reported.
    max_tokens: most tokens to generate; absent: until the context is full.
    min_tokens: stop tokens are impossible before so many tokens.
    stop: strings that end generation and are not part of the text.
    stop_token_ids: further tokens that end generation.
    ignore_eos: the model's own stop tokens do not end generation.
    logprobs: 0..20; each generated token comes with its log-probability and those of so many of the likeliest
        ones. None: without any.
    keep_special_tokens: special tokens are part of the text.
    structured: the form that the answer is held to, from its first token to its last.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    keep_special_tokens: bool = False
    structured: Structured | None = None

    def violations(self, *, vocab_size: int, prefix: str = "sampling") -> list[FieldViolation]:
        """Return every field that is out of range; empty if all is well."""
        return [
            *self.number_violations(vocab_size=vocab_size, prefix=prefix),
            *self.ending_violations(vocab_size=vocab_size, prefix=prefix),
        ]

    def number_violations(self, *, vocab_size: int, prefix: str = "sampling") -> list[FieldViolation]:
        """Return every number that is out of range."""
        bad = [*_range_violations(self, _CHOICE, prefix)]
        bad += _bias_violations(self.logit_bias, f"{prefix}.logit_bias", vocab_size)
        bad += _range_violations(self, _COUNTS, prefix)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens >= 0:
            found = f"found {self.min_tokens}, expected at most max_tokens ({self.max_tokens})"
            bad.append(FieldViolation(f"{prefix}.min_tokens", found))
        return bad

    def ending_violations(self, *, vocab_size: int, prefix: str = "sampling") -> list[FieldViolation]:
        """Return what is wrong with stop strings, stop tokens and the form of the answer."""
        bad = _stop_violations(self.stop, f"{prefix}.stop")
        bad += _listed(
            f"{prefix}.stop_token_ids",
            [(i, token) for i, token in enumerate(self.stop_token_ids) if not 0 <= token < vocab_size],
            f"an id of the vocabulary, 0 to {vocab_size - 1}",
        )
        if self.structured is not None:
            bad += spec.violations(self.structured, prefix=prefix)
        return bad


@dataclass(frozen=True, slots=True)
class Range:
    """Which numbers a field accepts; None is always fine, NaN never.

    accepted: the same in words. open_low: ``low`` itself is out of range.
    """

    name: str
    low: float
    high: float
    accepted: str
    open_low: bool = False

    def violation(self, value: float | None, prefix: str) -> FieldViolation | None:
        """Return what is wrong with a value of the field below ``prefix``, or None."""
        if value is None:
            return None
        above = value > self.low if self.open_low else value >= self.low
        if above and value <= self.high:  # NaN fails every comparison, so it is out of range too
            return None
        return FieldViolation(f"{prefix}.{self.name}", f"found {value!r}, expected {self.accepted}")


_SHARE: Final = "a number above 0 and at most 1"
_COUNT: Final = "an integer of at least 0"
_CHOICE: Final = (
    Range("temperature", 0, 2, "a number from 0 to 2"),
    Range("top_k", 0, math.inf, _COUNT),
    Range("top_p", 0, 1, _SHARE, open_low=True),
    Range("min_p", 0, 1, "a number from 0 to 1"),
    Range("repetition_penalty", 0, 2, "a number above 0 and at most 2", open_low=True),
    Range("typical_p", 0, 1, _SHARE, open_low=True),
    Range("presence_penalty", -MAX_PENALTY, MAX_PENALTY, "a number from -2 to 2"),
    Range("frequency_penalty", -MAX_PENALTY, MAX_PENALTY, "a number from -2 to 2"),
    Range("repeat_last_n", -1, MAX_WINDOW, f"an integer from 0 to {MAX_WINDOW}, or -1 for all tokens"),
)
_COUNTS: Final = (
    Range("logprobs", 0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}"),
    Range("seed", 0, MAX_SEED, f"an integer from 0 to {MAX_SEED}"),
    Range("max_tokens", 0, math.inf, _COUNT),
    Range("min_tokens", 0, math.inf, _COUNT),
)


def _range_violations(
    params: SamplingParams, ranges: Iterable[Range], prefix: str
) -> Iterator[FieldViolation]:
    for each in ranges:
        found = each.violation(getattr(params, each.name), prefix)
        if found is not None:
            yield found


def _stop_violations(stop: Sequence[str], name: str) -> list[FieldViolation]:
    bad: list[FieldViolation] = []
    if len(stop) > MAX_STOP_STRINGS:
        found = f"found '{len(stop)} strings', expected at most {MAX_STOP_STRINGS} strings"
        bad.append(FieldViolation(name, found))
    for index, text in enumerate(stop[:MAX_STOP_STRINGS]):
        size = len(text.encode("utf-8", "surrogatepass"))
        if not 0 < size <= MAX_STOP_BYTES:
            found = f"found '{size} bytes', expected 1 to {MAX_STOP_BYTES} bytes"
            bad.append(FieldViolation(f"{name}[{index}]", found))
        if _has_surrogate(text):
            found = f"found {text!r}, expected text without lone surrogates"
            bad.append(FieldViolation(f"{name}[{index}]", found))
    return bad


def _bias_violations(bias: Mapping[int, float], name: str, vocab_size: int) -> list[FieldViolation]:
    if len(bias) > MAX_BIASED_IDS:
        return [FieldViolation(name, f"found {len(bias)} ids, expected at most {MAX_BIASED_IDS}")]
    outside = [(token, token) for token in bias if not 0 <= token < vocab_size]
    beyond = [
        (token, value)
        for token, value in bias.items()
        if not -MAX_BIAS <= value <= MAX_BIAS  # NaN neither
    ]
    return _listed(name, outside, f"an id of the vocabulary, 0 to {vocab_size - 1}") + _listed(
        name, beyond, f"a number from -{MAX_BIAS:g} to {MAX_BIAS:g}"
    )


def _listed(name: str, bad: Sequence[tuple[int, object]], accepted: str) -> list[FieldViolation]:
    """Return a violation for each bad element, given by its index or key; many are counted instead."""
    listed = [
        FieldViolation(f"{name}[{key}]", f"found {value!r}, expected {accepted}")
        for key, value in bad[:MAX_LISTED_IDS]
    ]
    if len(bad) > MAX_LISTED_IDS:
        listed.append(FieldViolation(name, f"found {len(bad) - MAX_LISTED_IDS} more, expected {accepted}"))
    return listed


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """Sampling values with nothing left open. Ranges and meanings are those of :class:`SamplingParams`.

    temperature: 0 is greedy.  top_p, typical_p, repetition_penalty: 1 is off.  top_k, min_p and the other
        penalties: 0 is off.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    min_tokens: int
    seed: int
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = -1
    logit_bias: Mapping[int, float] = field(default_factory=dict)


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
        typical_p=_first(params.typical_p, defaults.typical_p, 1.0),
        presence_penalty=_first(params.presence_penalty, None, 0.0),
        frequency_penalty=_first(params.frequency_penalty, None, 0.0),
        repeat_last_n=_first(params.repeat_last_n, defaults.repeat_last_n, -1),
        logit_bias=params.logit_bias,
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
        typical_p=defaults.typical_p,
        repetition_penalty=defaults.repetition_penalty,
        repeat_last_n=defaults.repeat_last_n,
    )
    bad = params.violations(vocab_size=1, prefix="generation")
    if bad:
        found = "; ".join(f"{v.field}: {v.description}" for v in bad)
        raise ArtifactError(
            f"the manifest's generation defaults are unusable: {found}. Export the model again."
        )
