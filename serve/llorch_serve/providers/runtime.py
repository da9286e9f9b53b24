"""The inference runtime: which distribution is installed, and how its CPU kernels are to be run here.

The only module of ``providers`` that imports onnxruntime, and only when a session is opened.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from llorch_serve.errors import ProviderError

EXACT_BYTES: Final = ("session.x64quantprecision", "1")
"""A session setting for layers in per-channel int8. x86 CPUs without VNNI add pairs of products in 16 bits,
which saturates and gives wrong sums; with it the runtime makes the weights unsigned and takes exact, slower
kernels. Everywhere: CPUs with VNNI, which are exact without it, then take more than twice as long. It also
breaks DequantizeLinear over blocks.
"""

_EXACT_ANYWAY: Final = frozenset({"avx512_vnni", "avx_vnni"})
_CPU_INFO: Final = Path("/proc/cpuinfo")

# Every one of these distributions installs the same module, so two of them overwrite each other's files.
DISTRIBUTIONS: Final = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-webgpu",
    "onnxruntime-training",
    "onnxruntime-qnn",
)


def import_runtime(minimum: str, *, instead: str | None = None) -> ModuleType:
    """Return the onnxruntime module.

    minimum: lowest version that loads the artifact's graph (``1.24``). instead: what helps beside a newer
        one.
    Raises ProviderError if it is missing, installed twice, or too old.
    """
    found = installed_runtimes()
    if len(found) > 1:
        raise ProviderError(
            f"{' and '.join(found)} are both installed and overwrite each other; keep one: "
            f"pip uninstall -y {' '.join(found)} && pip install 'llorch[cpu]'"
        )
    try:
        import onnxruntime
    except ImportError as error:
        raise ProviderError(
            f"onnxruntime cannot be imported ({error}); install a runtime: pip install 'llorch[cpu]' (or "
            f"cuda, directml, openvino)"
        ) from error
    if _numbers(onnxruntime.__version__) < _numbers(minimum):
        raise ProviderError(
            f"onnxruntime {onnxruntime.__version__} is installed and this artifact needs {minimum} or later; "
            f"upgrade with: pip install -U '{found[0] if found else 'onnxruntime'}>={minimum}'"
            + ("" if instead is None else f", {instead}")
        )
    module: ModuleType = onnxruntime
    return module


def takes_no_rows(runtime: Any) -> bool:
    """Return whether layers in per-channel int8 may be given no rows at all: before 1.32, ReduceMax of none
    keeps its input's shape.
    """
    return _numbers(runtime.__version__) >= (1, 32)


def usable_cpus() -> int:
    """Return the number of CPUs this process may run on (cpuset and affinity respected)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def allowed_cores() -> tuple[int, ...]:
    """Return the numbers of the CPUs this process may run on; empty where the system does not tell."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def byte_settings(cpu_info: Path = _CPU_INFO) -> dict[str, str]:
    """Return the session settings with which products of bytes are exact here, and no slower than they must
    be.

    cpu_info: what Linux says of the CPUs; where there is none, :data:`EXACT_BYTES` is asked for.
    """
    try:
        lines = cpu_info.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = [frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")]
    exact = bool(flags) and all(_EXACT_ANYWAY & found for found in flags)
    return {} if exact else dict([EXACT_BYTES])


def require_exact_bytes(runtime: Any) -> None:
    """Raise ProviderError for a runtime that aborts with :data:`EXACT_BYTES`: 1.25 to 1.29 read beyond the
    end of a list when they make the weights unsigned.
    """
    if (1, 25) <= _numbers(runtime.__version__) < (1, 30):
        raise ProviderError(
            f"onnxruntime {runtime.__version__} ends the process where it multiplies bytes exactly, as this "
            f"CPU without VNNI needs it; upgrade with: pip install -U 'onnxruntime>=1.30', or export with "
            f"--activations block"
        )


def installed_runtimes() -> list[str]:
    """Return the distributions that are installed of those that bring the module; more than one is a
    fault.
    """
    return [name for name in DISTRIBUTIONS if version_of(name) is not None]


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution, or None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
