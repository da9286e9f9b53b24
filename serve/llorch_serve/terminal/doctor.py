"""``llorch doctor``: what this machine has for running models, what it lacks, and whether it computes what it
should.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_serve.terminal.console import fail, write, write_json
from llorch_serve.terminal.groups import composed, only
from llorch_serve.terminal.session_flags import ProviderFlags

if TYPE_CHECKING:
    from llorch_serve.doctor.examine import Examination
    from llorch_serve.providers.nvidia import Gpu


@composed
def command(
    artifact: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="An artifact to load and run once.", show_default=False),
    ] = None,
    *,
    provider: Annotated[ProviderFlags, only("provider", "provider_option", "ep_library", "allow_cpu_nodes")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Examine this machine: CPU, memory, NVIDIA's GPUs, runtimes, providers; test the operators that decoders
    rely upon against numpy.

    Exit codes: 0 all is well, 3 the artifact, 4 the runtime, the provider or an operator, 6 memory.

    For example:

        llorch doctor

        llorch doctor --provider cuda

        llorch doctor artifacts/smollm2 --json

    """
    from llorch_serve.doctor.examine import examine

    found = examine(provider.choice(), artifact)
    if as_json:
        write_json(found)
    else:
        write(_text(found))
    if found.problems:
        for problem in found.problems[1:]:
            fail(problem.message, problem.exit_code)
        raise SystemExit(fail(found.problems[0].message, found.problems[0].exit_code))


def _text(found: Examination) -> str:
    machine = found.machine
    lines = [
        f"system     {machine.system}, Python {machine.python}",
        f"CPU        {machine.cpu}; {machine.cpus_allowed} of {machine.cpus} CPUs allowed; "
        f"{' '.join(machine.cpu_features) or 'features not listed'}",
        f"memory     {machine.memory_free_bytes / 2**30:.1f} of {machine.memory_bytes / 2**30:.1f} GiB free",
        *(f"GPU {gpu.index:<6} {_gpu(gpu)}" for gpu in machine.gpus),
        f"runtime    {', '.join(found.runtimes) or 'none'}",
    ]
    lines += [
        f"{state.name:<10} {'here' if state.available else 'not here'}: {state.detail}"
        for state in found.providers
    ]
    if found.used is not None:
        lines.append(f"used       {found.used}")
    for result in found.operators:
        if result.error is None:
            lines.append(f"operator   {result.name}: fails")
            continue
        verdict = "ok" if result.passed else "WRONG"
        limit = f"; {result.reason}" if result.reason else ""
        lines.append(
            f"operator   {result.name}: {verdict}, off by {result.error:.1g} on {result.provider}{limit}"
        )
    if found.placement is not None:
        lines.append(f"artifact   {found.artifact}: runs; {found.placement}")
    return "\n".join(lines) + "\n"


def _gpu(gpu: Gpu) -> str:
    memory = "memory not told"
    if gpu.memory_bytes is not None and gpu.memory_free_bytes is not None:
        memory = f"{gpu.memory_free_bytes / 2**30:.1f} of {gpu.memory_bytes / 2**30:.1f} GiB free"
    return f"{gpu.name}; {memory}; driver {gpu.driver}"
