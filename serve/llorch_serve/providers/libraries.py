"""Shared libraries that a provider needs: which of them this process can load, and which it cannot.

Looking a library up by name differs on every system, so it is loaded, as the provider would do.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llorch_serve.providers.table import CPU, Provider

_ON_WINDOWS: Final = {"libcuda.so.1": "nvcuda.dll", "libvulkan.so.1": "vulkan-1.dll"}


@dataclass(frozen=True, slots=True)
class MissingLibrary:
    """A library that cannot be loaded. owner: whose it is, for people; reason: the loader's own words."""

    name: str
    owner: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.owner}"


def missing_libraries(row: Provider, runtime: Any = None) -> list[MissingLibrary]:
    """Return those of a provider's libraries that cannot be loaded here.

    runtime: onnxruntime, which says what CUDA version it was built for; None where it cannot be imported.
    """
    wanted = dict(row.libraries)
    version = getattr(runtime, "cuda_version", "") if row.name == "cuda" else ""
    if version:
        major = str(version).split(".")[0]
        wanted |= {
            f"libcudart.so.{major}": f"of CUDA {major}",
            f"libcublasLt.so.{major}": f"of CUDA {major}",
            "libcudnn.so.9": "of cuDNN 9",
        }
    return _unloadable(wanted)


def _unloadable(wanted: Mapping[str, str]) -> list[MissingLibrary]:
    missing: list[MissingLibrary] = []
    for name, owner in wanted.items():
        here = _name_here(name)
        if here is not None:
            try:
                ctypes.CDLL(here)
            except OSError as error:
                missing.append(MissingLibrary(here, owner, str(error)))
    return missing


def _name_here(name: str) -> str | None:
    """Return what a library is called on this system, or None where it has none, or its wheel looks for it
    itself.
    """
    return {"linux": name, "win32": _ON_WINDOWS.get(name)}.get(sys.platform)


def preload(runtime: Any) -> None:
    """Load CUDA and cuDNN from their wheels, where onnxruntime cannot find them by itself."""
    if hasattr(runtime, "preload_dlls"):
        with contextlib.redirect_stdout(sys.stderr):  # it prints what it does not find
            runtime.preload_dlls()


def available(runtime: Any) -> list[str]:
    """Return onnxruntime's names of the providers that can run a decoder here: built in, or of a registered
    plugin.
    """
    found = [str(name) for name in runtime.get_available_providers() if name != "AzureExecutionProvider"]
    if hasattr(runtime, "get_ep_devices"):
        found += [str(device.ep_name) for device in runtime.get_ep_devices()]
    return sorted(set(found), key=lambda name: (name == CPU, name))
