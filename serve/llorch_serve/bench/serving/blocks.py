"""Loads in words, and their rows as blocks for a terminal: speeds, latencies, failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from llorch_serve.bench.schema import Row, ServingTest

_LATENCIES: Final = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "gap": "gap",
    "e2e": "E2E",
    "late": "client late",
}
_PARTS: Final = ("mean", "p50", "p90", "p99", "max")
_SHOWN: Final = frozenset(
    {f"{name}_{part}_ms" for name in ("ttft", "tpot", "itl", "e2e") for part in ("p50", "p99")}
)

DETAILS: Final = frozenset(
    {f"{name}_{part}_ms" for name in _LATENCIES for part in _PARTS}
    | {"total_tokens_per_s", "good_tokens_per_s", "good_share", "succeeded", "duration_s", "peak_in_flight"}
    | {"prompt_tokens", "cached_tokens", "generated_tokens"}
).difference(_SHOWN)
"""Figures of a load that wide tables leave out."""


def describe_load(test: ServingTest) -> str:
    """Return a load in words, unlike every other's."""
    if test.arrivals == "open":
        assert test.rate_per_s is not None
        how = "Poisson" if test.burstiness in (None, 1) else f"burstiness {test.burstiness:g}"
        when = f"open loop, {test.rate_per_s:g} requests/s ({how})"
    else:
        clients = "1 client" if test.concurrency == 1 else f"{test.concurrency} clients"
        when = f"closed loop, {clients}"
    many = "" if test.requests is None else f", {test.requests} requests"
    many += "" if test.duration_s is None else f", for {test.duration_s:g} s"
    limits = "".join(f", {name} <= {limit:g} ms" for name, limit in test.limits_ms.items())
    seed = "" if test.seed is None else f", seed {test.seed}"
    return f"{when}{many}, {_asked(test)}{limits}{seed}{' over HTTP' if test.http else ''}"


def _asked(test: ServingTest) -> str:
    spread = f" +-{test.spread:.0%}" if test.spread else ""
    answer = f"{test.generated_tokens} tokens"
    if test.dataset is not None:
        return f"prompts of {test.dataset} with up to {answer} unless they say otherwise"
    return f"{test.prompt_tokens} + {answer}{spread}"


def is_load(row: Row) -> bool:
    """Tell whether a row is of a load, and not of streams that start together."""
    return isinstance(row.test, ServingTest) and row.test.arrivals != "together"


def describe_row(row: Row) -> str:
    """Return what a load found, as lines; each number is the median of its runs."""
    assert isinstance(row.test, ServingTest)
    return "\n".join([describe_load(row.test), *(f"  {line}" for line in _lines(row))]) + "\n"


def _lines(row: Row) -> Iterator[str]:
    def value(name: str) -> float:
        return row.figures[name].median

    yield (
        f"requests  {value('requests_per_s'):.4g}/s: {value('succeeded'):g} whole and {value('failed'):g} "
        f"failed in "
        f"{value('duration_s'):.1f} s, at most {value('peak_in_flight'):g} in flight"
    )
    yield (
        f"tokens    {value('output_tokens_per_s'):.4g}/s generated, {value('total_tokens_per_s'):.4g}/s "
        f"with prompts; "
        f"{value('cached_tokens'):g} of {value('prompt_tokens'):g} prompt tokens were cached"
    )
    if "good_share" in row.figures:
        yield (
            f"goodput   {value('good_requests_per_s'):.4g} requests/s, {value('good_tokens_per_s'):.4g} "
            f"tokens/s: "
            f"{value('good_share'):.1%} of the requests kept every limit"
        )
    yield f"{'ms':<12}{''.join(f'{part:>11}' for part in _PARTS)}"
    for name, title in _LATENCIES.items():
        if f"{name}_mean_ms" in row.figures:
            cells = (f"{value(f'{name}_{part}_ms'):>11.2f}" for part in _PARTS)
            yield f"{title:<12}{''.join(cells)}"
    for failure in row.failures:
        yield (
            f"failed    {failure.requests} {failure.status}, {failure.after_first_token} of them after "
            f"their first token "
            f"({failure.tokens} tokens, counted nowhere else): {failure.example}"
        )
