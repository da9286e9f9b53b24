"""What a request may ask of sampling, in ranges that are checked, with gaps filled by the artifact's
defaults.

Input comes from the command line or gRPC; :class:`ResolvedSampling` goes to ``sampler.py``, which does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from llorch_serve.artifact.manifest import GenerationDefaults
from llorch_serve.errors import ArtifactError, FieldViolation
from llorch_serve.sampling.logprobs import MAX_LOGPROBS
from llorch_serve.sampling.ranges import (
    Range,
    bias_violations,
    listed,
    range_violations,
    stop_violations,
)
from llorch_serve.structured import spec
from llorch_serve.structured.spec import Structured

MAX_SEED = 2**63 - 1
MAX_PENALTY = 2.0
MAX_WINDOW = 2**31 - 1

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
        bad = [*range_violations(self, _CHOICE, prefix)]
        bad += bias_violations(self.logit_bias, f"{prefix}.logit_bias", vocab_size)
        bad += range_violations(self, _COUNTS, prefix)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens >= 0:
            found = f"found {self.min_tokens}, expected at most max_tokens ({self.max_tokens})"
            bad.append(FieldViolation(f"{prefix}.min_tokens", found))
        return bad

    def ending_violations(self, *, vocab_size: int, prefix: str = "sampling") -> list[FieldViolation]:
        """Return what is wrong with stop strings, stop tokens and the form of the answer."""
        bad = stop_violations(self.stop, f"{prefix}.stop")
        bad += listed(
            f"{prefix}.stop_token_ids",
            [(i, token) for i, token in enumerate(self.stop_token_ids) if not 0 <= token < vocab_size],
            f"an id of the vocabulary, 0 to {vocab_size - 1}",
        )
        if self.structured is not None:
            bad += spec.violations(self.structured, prefix=prefix)
        return bad


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    """Sampling values with nothing left open. Ranges and meanings are those of :class:`SamplingParams`; the
    defaults here are the neutral values, with which a field does nothing and an answer is greedy.
    """

    seed: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = -1
    logit_bias: Mapping[int, float] = field(default_factory=dict)


_RECOMMENDED: Final = GenerationDefaults.__struct_fields__
"""What an artifact may recommend, by its name there and in a request."""
_RESOLVED: Final = tuple(each.name for each in fields(ResolvedSampling))


def resolve(
    params: SamplingParams, defaults: GenerationDefaults, draw_seed: Callable[[], int]
) -> ResolvedSampling:
    """Return the request's value, else the artifact's default, else the neutral value, for every field.

    ``draw_seed`` is called only if the request names no seed.
    """
    chosen = {name: getattr(params, name) for name in _RESOLVED}
    for name in _RECOMMENDED:
        if chosen[name] is None:
            chosen[name] = getattr(defaults, name)
    if chosen["seed"] is None:
        chosen["seed"] = draw_seed()
    return ResolvedSampling(**{name: value for name, value in chosen.items() if value is not None})


def check_defaults(defaults: GenerationDefaults) -> None:
    """Raise ArtifactError if an artifact recommends values that no request may ask for."""
    params = SamplingParams(**{name: getattr(defaults, name) for name in _RECOMMENDED})
    bad = params.violations(vocab_size=1, prefix="generation")
    if bad:
        found = "; ".join(f"{v.field}: {v.description}" for v in bad)
        raise ArtifactError(
            f"the manifest's generation defaults are unusable: {found}. Export the model again."
        )
