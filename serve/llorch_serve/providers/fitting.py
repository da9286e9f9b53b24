"""Whether an artifact's graph is one that a provider runs: its target, and the types that it computes in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from llorch_serve.artifact.manifest import ComputeType, Target
from llorch_serve.errors import ProviderError
from llorch_serve.providers.table import ARITHMETIC, PROVIDERS, RUNS

_EXPORTED_AS: Final[Mapping[ComputeType, str]] = {
    "float32": "--precision fp32",
    "float16": "--precision fp16",
    "bfloat16": "--precision bf16",
}


def check_target(target: Target, provider: str) -> None:
    """Raise ProviderError if a provider does not run graphs made for ``target``.

    provider: onnxruntime's name. One that is not in the table is another's plugin, of which nothing is known
        before it runs.
    """
    runs = RUNS.get(provider)
    if runs is None or target in runs:
        return
    also = [row.name for row in PROVIDERS if target in row.targets]
    raise ProviderError(
        f"the artifact is for target {target}, and {provider} runs {', '.join(runs)}; "
        f"export the model again with: llorch export SOURCE --output DIR --target {runs[0]}"
        + (f"; or run this artifact with --provider {' or '.join(also)}" if also else "")
    )


def require_arithmetic(provider: str, types: Iterable[ComputeType]) -> None:
    """Raise ProviderError if a provider has no arithmetic in one of the types that an artifact computes
    in.
    """
    known = ARITHMETIC.get(provider)
    if known is None:
        return
    for missing in sorted(set(types) - set(known)):
        others = [name for name, table in ARITHMETIC.items() if missing in table]
        raise ProviderError(
            f"the artifact computes in {missing} and {provider} has no {missing} arithmetic; export the "
            f"model again with "
            f"{' or '.join(_EXPORTED_AS[kind] for kind in known)}, or run this artifact on a provider that "
            f"has it "
            f"({', '.join(others)})"
        )
