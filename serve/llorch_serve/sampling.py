"""What a request may ask of sampling, in ranges that are checked, with gaps filled by the artifact's defaults.

Input comes from the command line or gRPC; :class:`ResolvedSampling` goes to ``sampler.py``, which does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from llorch_serve.errors import ArtifactError, FieldViolation
from llorch_serve.manifest import GenerationDefaults
from llorch_serve.structured import spec
from llorch_serve.structured.spec import Structured

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_SEED = 2**63 - 1
MAX_LISTED_IDS = 16  # bad stop_token_ids that are named one by one; a status message has room for few

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
    structured: the form that the answer is held to, from its first token to its last.
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
    structured: Structured | None = None

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
        if self.structured is not None:
            bad += spec.violations(self.structured, prefix=prefix)
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
