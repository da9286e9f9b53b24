"""Tell a graph that is too new for the runtime from one that is damaged.

Input is the runtime's message and the ONNX file; output is an error's text that names both versions, so that
nobody exports again what only needs a newer runtime.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from llorch_serve.providers.onnx_messages import model_class
from llorch_serve.providers.runtime import installed_runtimes

_MAX_GRAPH_BYTES: Final = 2**30
_NEWEST_FORMAT: Final = re.compile(r"max supported IR version: (\d+)")
_NEWEST_OPSET: Final = re.compile(r"Current official support for domain (\S+) is till opset (\d+)")


def newer_than_runtime(path: Path, message: str, runtime: Any) -> str | None:
    """Return what is too new for the runtime, both versions and what to do; None if that is not the reason.

    message: what the runtime said when it refused the graph.
    """
    found = _newest_format(path, message) or _newest_opset(path, message)
    if found is None:
        return None
    package = next(iter(installed_runtimes()), "onnxruntime")
    return (
        f"{path} has {found[0]}, and onnxruntime {runtime.__version__} goes up to {found[1]}; upgrade the "
        f"runtime with: pip install -U {package}"
    )


def _newest_format(path: Path, message: str) -> tuple[str, str] | None:
    if (limit := _NEWEST_FORMAT.search(message)) is None:
        return None
    model = _read(path)
    has = f"IR version {model.ir_version}" if model is not None and model.ir_version else "a newer IR version"
    return has, limit[1]


def _newest_opset(path: Path, message: str) -> tuple[str, str] | None:
    if (limit := _NEWEST_OPSET.search(message)) is None:
        return None
    model = _read(path)
    domain = "" if limit[1] == "ai.onnx" else limit[1]
    versions = (
        [] if model is None else [o.version for o in model.opset_import if o.domain in (domain, limit[1])]
    )
    return (f"opset {max(versions)} of {limit[1]}" if versions else f"a newer opset of {limit[1]}"), limit[2]


def _read(path: Path) -> Any | None:
    """Return the graph, or None if it cannot be read; what it says is only told, never acted on."""
    model = model_class()()
    try:
        if path.stat().st_size > _MAX_GRAPH_BYTES:
            return None
        model.ParseFromString(path.read_bytes())
    except (OSError, DecodeError):
        return None
    return model
