"""Running the operators relied upon on a provider, and holding what they give against numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from llorch_serve.errors import ProviderError
from llorch_serve.providers import CPU, ActiveProvider
from llorch_serve.runtime.graph_loading import runtime_options
from llorch_serve.runtime.operator_graphs import (
    ATTENTION,
    WIDE,
    AttentionType,
    OperatorCase,
    attention,
    cases,
)


@dataclass(frozen=True, slots=True)
class OperatorResult:
    """What an operator did.

    passed: it computes what it should. provider: where it ran; another than the one under test takes it
        instead.
    error: the largest difference as part of the largest value, or None where it did not run; reason: why not,
        or with what limit.
    """

    name: str
    passed: bool
    provider: str | None
    error: float | None
    reason: str | None = None


_FEWER: Final = (4, 2, 1)  # rows of attention to try where more are computed wrongly


def attention_rows(runtime: Any, provider: ActiveProvider, threads: int) -> int | None:
    """Return how many tokens of a prompt a provider's attention computes rightly in one call; None: any
    number.

    One that does not load leaves it to the graph that needs it to say so.
    Raises ProviderError if it is wrong for a single one.
    """
    element = _attention_type(provider)
    wide = _run(runtime, provider, threads, attention(element=element))
    if wide.passed or wide.error is None:
        return None
    for rows in _FEWER:
        if _run(runtime, provider, threads, attention(rows, WIDE - rows, element)).passed:
            return rows
    raise ProviderError(
        f"{provider.runtime_name} computes {ATTENTION} wrongly here: it is off by {wide.error:.2g} of the "
        f"largest value; "
        "use another provider, or another release of its wheel"
    )


def _attention_type(provider: ActiveProvider) -> AttentionType:
    """Return float32, or float16 where a provider does not attend in that."""
    exact = provider.row is None or "float32" in provider.row.arithmetic
    return "float32" if exact else "float16"


def run_operators(runtime: Any, provider: ActiveProvider, threads: int) -> list[OperatorResult]:
    """Run every operator that decoders for a provider rely upon."""
    target = "cpu" if provider.row is None else provider.row.targets[0]
    found = [_run(runtime, provider, threads, case) for case in cases(target, _attention_type(provider))]
    return [_narrowed(result, runtime, provider, threads) for result in found]


def _narrowed(result: OperatorResult, runtime: Any, provider: ActiveProvider, threads: int) -> OperatorResult:
    """Return the result, passed where a session makes do with fewer rows of attention."""
    if result.passed or result.name != ATTENTION:
        return result
    try:
        rows = attention_rows(runtime, provider, threads)
    except ProviderError:
        rows = None
    if rows is None:
        return result
    return replace(result, passed=True, reason=too_many_rows(rows))


def too_many_rows(rows: int) -> str:
    """Return a phrase for people."""
    return (
        f"attention over more than {rows} rows is wrong here, so prompts go {rows} "
        f"token{'s' if rows > 1 else ''} at a time"
    )


def _run(runtime: Any, provider: ActiveProvider, threads: int, case: OperatorCase) -> OperatorResult:
    options = runtime_options(runtime, threads)
    try:
        arguments = provider.without_captures().add_to(options)
        session = runtime.InferenceSession(case.model, sess_options=options, **arguments)
        found = session.run(["y"], dict(case.feeds))[0]
    except Exception as error:  # noqa: BLE001 - the runtime's own classes of errors share no narrower base
        return OperatorResult(case.name, False, None, None, " ".join(str(error).split())[:300])
    where = [part.ep_name for part in session.get_provider_graph_assignment_info() if part.get_nodes()]
    difference = float(np.abs(found - case.expected).max() / np.abs(case.expected).max())
    return OperatorResult(
        case.name, bool(difference <= case.tolerance), where[0] if where else CPU, difference
    )
