"""What a task of lm-eval asks of answers, its ``generation_kwargs``, as our sampling."""

from __future__ import annotations

from typing import Any, Final

from llorch_serve.errors import UsageError
from llorch_serve.sampling.params import SamplingParams

MOST_TOKENS: Final = 256  # what lm-eval's own models generate where a task does not say
KNOWN: Final = frozenset(
    {
        "until", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed",
        "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens",
    }
)  # fmt: skip
"""What of a task's ``generation_kwargs`` has an effect."""


def sampling_of(wanted: dict[str, Any]) -> SamplingParams:
    """Return what a task's ``generation_kwargs`` mean: greedy unless it says ``do_sample``, or a temperature
    above 0. Raises UsageError for a value that is of another type.
    """
    try:
        return _sampling_of(wanted)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a task's generation_kwargs are {wanted!r}: {error}; correct the task") from error


def _sampling_of(wanted: dict[str, Any]) -> SamplingParams:
    until = wanted.get("until") or []
    stop = [until] if isinstance(until, str) else until
    temperature = float(wanted.get("temperature", 1.0 if wanted.get("do_sample") else 0.0))
    sampled = bool(wanted.get("do_sample", temperature > 0)) and temperature > 0
    most = next(
        (wanted[name] for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
         if name in wanted),
        MOST_TOKENS,
    )  # fmt: skip
    return SamplingParams(
        temperature=temperature if sampled else 0.0,
        top_p=float(wanted.get("top_p", 1.0)) if sampled else 1.0,
        top_k=int(wanted.get("top_k", 0)) if sampled else 0,
        min_p=float(wanted.get("min_p", 0.0)) if sampled else 0.0,
        repetition_penalty=float(wanted.get("repetition_penalty", 1.0)),
        seed=int(wanted["seed"]) if "seed" in wanted else None,
        max_tokens=int(most),
        stop=tuple(text for text in stop if text),
    )
