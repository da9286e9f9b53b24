"""Running the operators relied upon on a provider, and holding what they give against numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from llorch_serve.doctor.operator_graphs import OperatorCase, cases
from llorch_serve.graph_loading import runtime_options
from llorch_serve.providers import CPU, ActiveProvider


@dataclass(frozen=True, slots=True)
class OperatorResult:
    """What an operator did.

    passed: it computes what it should. provider: where it ran; another than the one under test takes it instead.
    error: the largest difference as part of the largest value, or None where it did not run; reason: why not.
    """

    name: str
    passed: bool
    provider: str | None
    error: float | None
    reason: str | None = None


def run_operators(runtime: Any, provider: ActiveProvider, threads: int) -> list[OperatorResult]:
    """Run every operator that decoders for a provider rely upon."""
    target = "cpu" if provider.row is None else provider.row.targets[0]
    return [_run(runtime, provider, threads, case) for case in cases(target)]


def _run(runtime: Any, provider: ActiveProvider, threads: int, case: OperatorCase) -> OperatorResult:
    options = runtime_options(runtime, threads)
    try:
        session = runtime.InferenceSession(case.model, sess_options=options, **provider.add_to(options))
        found = session.run(["y"], dict(case.feeds))[0]
    except Exception as error:  # noqa: BLE001 - the runtime's own classes of errors share no narrower base
        return OperatorResult(case.name, False, None, None, " ".join(str(error).split())[:300])
    where = [part.ep_name for part in session.get_provider_graph_assignment_info() if part.get_nodes()]
    difference = float(np.abs(found - case.expected).max() / np.abs(case.expected).max())
    return OperatorResult(
        case.name, bool(difference <= case.tolerance), where[0] if where else CPU, difference
    )
