"""The examination: machine, runtime, providers, operators and, if there is one, an artifact.

Everything that can be found out is, whatever is wrong before it; problems are kept with their exit codes.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.config import SessionConfig
from llorch_serve.doctor.machine import Machine, look_at_machine
from llorch_serve.errors import LlorchError
from llorch_serve.loading.models import open_model
from llorch_serve.providers import (
    CPU,
    PROVIDERS,
    ActiveProvider,
    Provider,
    ProviderChoice,
    activate,
    import_runtime,
)
from llorch_serve.providers.choose import absent
from llorch_serve.providers.libraries import available, missing_libraries
from llorch_serve.providers.placement import describe_shares
from llorch_serve.providers.runtime import installed_runtimes, version_of
from llorch_serve.runtime.operator_check import OperatorResult, run_operators

MIN_ONNXRUNTIME: Final = "1.24"
_CONTEXT: Final = 64  # tokens of the cache that an artifact is tried with


@dataclass(frozen=True, slots=True)
class ProviderState:
    """One provider here. wheel: what brings it, with the version that is installed. missing: libraries that
    are not here.
    """

    name: str
    available: bool
    wheel: str
    missing: tuple[str, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong, and the exit code of its class."""

    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found. used: onnxruntime's name of the provider that would run a graph, or None.

    placement: where the artifact's nodes run, for people; None without an artifact that runs.
    """

    machine: Machine
    runtimes: tuple[str, ...]
    providers: tuple[ProviderState, ...]
    used: str | None
    operators: tuple[OperatorResult, ...]
    artifact: str | None
    placement: str | None
    problems: tuple[Problem, ...]


def examine(choice: ProviderChoice, folder: Path | None) -> Examination:
    """Look at this machine, test a provider's operators, and load an artifact on it if there is one."""
    machine = look_at_machine()
    problems: list[Problem] = []
    states: list[ProviderState] = []
    operators: list[OperatorResult] = []
    active: ActiveProvider | None = None
    placed: str | None = None
    try:
        runtime = import_runtime(MIN_ONNXRUNTIME)
        states = [_state(row, runtime) for row in PROVIDERS]
        active = activate(choice, runtime)
        operators = run_operators(runtime, active, machine.cpus_allowed)
        problems += _wrong(operators, active.runtime_name, allow_cpu_nodes=choice.allow_cpu_nodes)
    except LlorchError as error:
        problems.append(Problem(error.exit_code, str(error)))
    if folder is not None and active is not None:
        try:
            placed = _try(folder, choice)
        except LlorchError as error:
            problems.append(Problem(error.exit_code, str(error)))
    return Examination(
        machine=machine,
        runtimes=tuple(f"{name} {version_of(name)}" for name in installed_runtimes()),
        providers=tuple(states),
        used=None if active is None else active.runtime_name,
        operators=tuple(operators),
        artifact=None if folder is None else str(folder),
        placement=placed,
        problems=tuple(problems),
    )


def _state(row: Provider, runtime: Any) -> ProviderState:
    version = version_of(row.wheel)
    here = row.runtime_name in available(runtime)
    missing = tuple(map(str, missing_libraries(row, runtime)))
    plugin = row.plugin is not None and importlib.util.find_spec(row.plugin) is not None
    if here and not missing:
        detail = f"runs on {row.device}"
    elif plugin:
        detail = f"its plugin is installed; llorch doctor --provider {row.name} loads it"
    else:
        detail = str(absent(row, runtime)).partition(": ")[2].partition("; available here")[0]
    return ProviderState(
        row.name, here and not missing, f"{row.wheel} {version}" if version else row.wheel, missing, detail
    )


def _wrong(results: list[OperatorResult], provider: str, *, allow_cpu_nodes: bool) -> list[Problem]:
    problems = []
    for result in results:
        if not result.passed:
            what = f"is off by {result.error:.3g}" if result.error is not None else f"fails: {result.reason}"
            problems.append(Problem(4, f"{result.name} on {result.provider or provider} {what}"))
        elif result.provider != provider and not allow_cpu_nodes:
            problems.append(
                Problem(
                    4,
                    f"{result.name} runs on {result.provider}, not on {provider}; accept that with "
                    f"--allow-cpu-nodes",
                )
            )
    return problems


def _try(folder: Path, choice: ProviderChoice) -> str:
    """Load an artifact and run one token; return where its nodes are. Raises what serving it would raise."""
    artifact = load_artifact(folder)
    context = min(_CONTEXT, artifact.manifest.context_length)
    config = SessionConfig(slots=1, max_context=context, provider=choice)
    session = open_model(artifact, config, lambda _report: None)
    session.prefill(0, (artifact.manifest.bos_token_id or 0,), 0)
    where = session.placement
    return describe_shares(where.shares) or f"{where.node_share:.1%} of nodes on {where.provider or CPU}"
