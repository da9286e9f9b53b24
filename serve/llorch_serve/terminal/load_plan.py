"""From the flags of ``llorch bench`` that put a worker under load to the tests that they ask for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from llorch_serve.errors import UsageError
from llorch_serve.terminal.bench_flags import LengthFlags
from llorch_serve.terminal.load_flags import LoadFlags

if TYPE_CHECKING:
    from llorch_serve.bench.schema import ServingTest

LIMITS: Final = ("ttft", "tpot", "e2e")
_DEFAULT_REQUESTS: Final = 100


def plan_load(
    flags: LoadFlags, lengths: LengthFlags, *, prompt_tokens: int | None, dataset: str | None, http: bool
) -> list[ServingTest]:
    """Return the tests that the flags ask for. Prompts have ``prompt_tokens``, or are those of a dataset, of
    which this is the name.

    Raises UsageError for flags that say nothing together, and for values out of range.
    """
    from llorch_serve.bench.schema import ServingTest

    _check_together(flags, lengths, http=http)
    limits = dict(_read_limit(value) for value in flags.slo or ())
    if len(limits) < len(flags.slo or ()):
        raise UsageError("--slo has two limits of one figure; give one of each")
    spread = 0.0 if flags.spread is None else flags.spread
    _check_range("--spread", spread, above=None, below=1)
    if flags.duration is not None:
        _check_range("--duration", flags.duration, above=0)
    requests = flags.requests
    if requests is None and flags.duration is None:
        requests = _DEFAULT_REQUESTS
    draws = flags.request_rate is not None or spread > 0 or _draws_ids(lengths, flags, http=http)
    if flags.seed is not None and not draws:
        raise UsageError(
            "--seed has no effect on a closed loop with fixed lengths; leave it out, or add --spread"
        )
    seed = (flags.seed or 0) if draws else None

    def make(concurrency: int | None, rate: float | None) -> ServingTest:
        return ServingTest(
            arrivals="closed" if rate is None else "open",
            prompt_tokens=prompt_tokens,
            generated_tokens=lengths.max_tokens,
            spread=spread,
            dataset=dataset,
            concurrency=concurrency,
            rate_per_s=rate,
            burstiness=None if rate is None else 1.0 if flags.burstiness is None else flags.burstiness,
            seed=seed,
            requests=requests,
            duration_s=flags.duration,
            limits_ms=limits,
            http=http,
        )

    if flags.request_rate is not None:
        return [make(None, rate) for rate in _read_numbers("--request-rate", flags.request_rate)]
    counts = _read_numbers("--concurrency", flags.concurrency or "")
    if any(count != int(count) for count in counts):
        raise UsageError(f"--concurrency is {flags.concurrency!r}; expected whole numbers, like 1,8")
    return [make(int(count), None) for count in counts]


def _draws_ids(lengths: LengthFlags, flags: LoadFlags, *, http: bool) -> bool:
    """Tell whether prompts are made of drawn ids, as they are where no tokenizer can be asked."""
    return http and lengths.prompt_ids is None and flags.dataset is None


def _check_together(flags: LoadFlags, lengths: LengthFlags, *, http: bool) -> None:
    if flags.concurrency is not None and flags.request_rate is not None:
        raise UsageError(
            "--concurrency is for closed loops and --request-rate for open ones; measure one after the other"
        )
    if flags.concurrency is None and flags.request_rate is None:
        raise UsageError(
            f"{flags.given()[0]} has no effect without --concurrency or --request-rate; add one of them"
        )
    if flags.requests is not None and flags.duration is not None:
        raise UsageError("--requests and --duration both end a run; give one of them")
    if lengths.prompt_tokens is not None and lengths.prompt_tokens < 1:
        raise UsageError(f"--prompt-tokens is {lengths.prompt_tokens}; at least 1 is needed")
    if flags.burstiness is not None:
        if flags.request_rate is None:
            raise UsageError("--burstiness has no effect without --request-rate; leave it out")
        _check_range("--burstiness", flags.burstiness, above=0)
    if flags.spread is not None and lengths.prompt_ids is not None:
        raise UsageError(
            "--spread does not go with --prompt-ids, whose prompt has one length; use --prompt-tokens"
        )
    if flags.dataset is not None:
        for name, value in (
            ("--prompt-tokens", lengths.prompt_tokens),
            ("--prompt-ids", lengths.prompt_ids),
            ("--spread", flags.spread),
        ):
            if value is not None:
                raise UsageError(f"{name} has no effect with --dataset, which has the prompts; leave it out")


def _check_range(flag: str, value: float, *, above: float | None, below: float = math.inf) -> None:
    low = value >= 0 if above is None else value > above
    if not (low and value < below):
        least = "0 or more" if above is None else f"above {above:g}"
        most = "" if math.isinf(below) else f" and below {below:g}"
        raise UsageError(f"{flag} is {value:g}; expected a number {least}{most}")


def _read_numbers(flag: str, value: str) -> list[float]:
    try:
        numbers = [float(part) for part in value.split(",")]
    except ValueError as error:
        raise UsageError(f"{flag} is {value!r}; expected numbers separated by commas, like 1,8") from error
    if not all(0 < number < math.inf for number in numbers):
        raise UsageError(f"{flag} is {value!r}; every number must be above 0")
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{flag} is {value!r}; every number must be another one")
    return numbers


def _read_limit(value: str) -> tuple[str, float]:
    name, _, limit = value.partition(":")
    try:
        milliseconds = float(limit)
    except ValueError:
        milliseconds = 0.0
    if name not in LIMITS or not 0 < milliseconds < math.inf:
        raise UsageError(
            f"--slo is {value!r}; expected {', '.join(LIMITS)} with milliseconds above 0, like ttft:200"
        )
    return name, milliseconds
