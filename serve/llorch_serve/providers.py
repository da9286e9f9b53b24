"""The inference runtime and its execution providers: which is installed, and is the one asked for really used.

With ``session.py`` the only module that imports onnxruntime, and only when a session is opened.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from llorch_serve.errors import ProviderError
from llorch_serve.manifest import ComputeType, Target

CPU: Final = "CPUExecutionProvider"

EXACT_BYTES: Final = ("session.x64quantprecision", "1")
"""A session setting for layers in whole bytes. x86 CPUs without VNNI add pairs of products in 16 bits, which saturates
and gives wrong sums; with it the runtime makes the weights unsigned and takes exact, slower kernels. Everywhere: CPUs with
VNNI, which are exact without it, then take more than twice as long. It also breaks DequantizeLinear over blocks."""

_EXACT_ANYWAY: Final = frozenset({"avx512_vnni", "avx_vnni"})
_CPU_INFO: Final = Path("/proc/cpuinfo")

RUNS: Final[Mapping[str, tuple[Target, ...]]] = {
    CPU: ("cpu", "portable", "cuda", "directml", "openvino", "webgpu"),
}
"""Targets whose graphs a provider has kernels for. The CPU's has all but those of coreml's, whose graphs of fixed shapes
this worker does not drive."""

# Every one of these distributions installs the same module, so two of them overwrite each other's files.
_DISTRIBUTIONS: Final = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-training",
    "onnxruntime-qnn",
)


class Arithmetic(StrEnum):
    """How a provider computes in a type. WIDENED: it stores the type and computes in float32, between casts."""

    NATIVE = "native"
    WIDENED = "widened"


ARITHMETIC: Final[dict[str, dict[ComputeType, Arithmetic]]] = {
    CPU: {"float32": Arithmetic.NATIVE, "float16": Arithmetic.WIDENED},
    "CUDAExecutionProvider": dict.fromkeys(("float32", "float16", "bfloat16"), Arithmetic.NATIVE),
    "DmlExecutionProvider": dict.fromkeys(("float32", "float16"), Arithmetic.NATIVE),
    "WebGpuExecutionProvider": dict.fromkeys(("float32", "float16"), Arithmetic.NATIVE),
}
"""What providers compute the decoder's operators in; a type that is absent they have no kernels for."""

_EXPORTED_AS: Final[dict[ComputeType, str]] = {
    "float32": "--precision fp32",
    "float16": "--precision fp16",
    "bfloat16": "--precision bf16",
}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the graph's nodes run. node_share: part of the nodes on ``provider``, 0..1."""

    provider: str
    node_share: float


def import_runtime(minimum: str) -> ModuleType:
    """Return the onnxruntime module.

    minimum: lowest version that loads the artifact's graph (``1.24``).
    Raises ProviderError if it is missing, installed twice, or too old.
    """
    found = [name for name in _DISTRIBUTIONS if _version(name) is not None]
    if len(found) > 1:
        raise ProviderError(
            f"{' and '.join(found)} are both installed and overwrite each other; keep one: "
            f"pip uninstall -y {' '.join(found)} && pip install 'llorch[cpu]'"
        )
    try:
        import onnxruntime
    except ImportError as error:
        raise ProviderError(
            f"onnxruntime cannot be imported ({error}); install a runtime: pip install 'llorch[cpu]' (or cuda, directml, openvino)"
        ) from error
    if _numbers(onnxruntime.__version__) < _numbers(minimum):
        raise ProviderError(
            f"onnxruntime {onnxruntime.__version__} is installed and this artifact needs {minimum} or later; "
            f"upgrade with: pip install -U '{found[0] if found else 'onnxruntime'}>={minimum}'"
        )
    module: ModuleType = onnxruntime
    return module


def check_target(target: Target, provider: str) -> None:
    """Raise ProviderError if a provider does not run graphs made for ``target``."""
    if target not in RUNS[provider]:
        raise ProviderError(
            f"the artifact is for target {target}, and {provider} runs {', '.join(RUNS[provider])}; "
            f"export the model again with --target {RUNS[provider][0]}"
        )


def require_arithmetic(provider: str, types: Iterable[ComputeType]) -> None:
    """Raise ProviderError if a provider has no arithmetic in one of the types that an artifact computes in."""
    known = ARITHMETIC[provider]
    for missing in sorted(set(types) - set(known)):
        others = [name for name, table in ARITHMETIC.items() if missing in table]
        raise ProviderError(
            f"the artifact computes in {missing} and {provider} has no {missing} arithmetic; export the model again with "
            f"{' or '.join(_EXPORTED_AS[kind] for kind in known)}, or run this artifact on a provider that has it "
            f"({', '.join(others)})"
        )


def usable_cpus() -> int:
    """Return the number of CPUs this process may run on (cpuset and affinity respected)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def byte_settings(cpu_info: Path = _CPU_INFO) -> dict[str, str]:
    """Return the session settings with which products of bytes are exact here, and no slower than they must be.

    cpu_info: what Linux says of the CPUs; where there is none, :data:`EXACT_BYTES` is asked for.
    """
    try:
        lines = cpu_info.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = [frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")]
    exact = bool(flags) and all(_EXACT_ANYWAY & found for found in flags)
    return {} if exact else dict([EXACT_BYTES])


def placement(session: Any, provider: str) -> Placement:
    """Return where the nodes of a session really run, and refuse a session that fell back to another provider.

    The session must have been made with ``session.record_ep_graph_assignment_info``.
    """
    providers = session.get_providers()
    if not providers or providers[0] != provider:
        raise ProviderError(f"{provider} was asked for and the runtime uses {', '.join(providers) or 'none'}")
    total = mine = 0
    for subgraph in session.get_provider_graph_assignment_info():
        nodes = len(subgraph.get_nodes())
        total += nodes
        mine += nodes if subgraph.ep_name == provider else 0
    return Placement(provider=provider, node_share=mine / total if total else 0.0)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
