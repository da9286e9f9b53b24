"""Plugin libraries: providers that onnxruntime loads at run time, from a wheel or from a path.

A library is registered once a process, and onnxruntime then lists the devices that its providers can use.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from llorch_serve.errors import ProviderError

OLDEST_WITH_PLUGINS = "1.23"


def wheel_library(module: str) -> Path | None:
    """Return the path of the library in a plugin wheel, or None where the wheel is not installed.

    Raises ProviderError if the wheel is damaged.
    """
    if importlib.util.find_spec(module) is None:
        return None
    try:
        wheel = importlib.import_module(module)
        locate = getattr(wheel, "get_library_path", None) or wheel.library_path
        return Path(locate())
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise ProviderError(
            f"the plugin {module} is installed and names no library ({error}); install it again"
        ) from error


def register(runtime: Any, library: Path) -> list[Any]:
    """Load a plugin library, unless it is loaded, and return the devices that its providers offer.

    Raises ProviderError if this onnxruntime has no plugins, or the library is missing or refuses to load.
    """
    if not hasattr(runtime, "register_execution_provider_library"):
        raise ProviderError(
            f"onnxruntime {runtime.__version__} loads no plugin libraries; install {OLDEST_WITH_PLUGINS} or "
            f"later"
        )
    path = library.resolve()
    if not path.is_file():
        raise ProviderError(
            f"--ep-library is {library}, which is no file; expected a provider's shared library"
        )
    devices = _devices(runtime, path)
    if devices:
        return devices
    before = {_identity(device) for device in runtime.get_ep_devices()}
    try:
        runtime.register_execution_provider_library(f"llorch-{path.name}", str(path))
    except Exception as error:  # the runtime's own classes of errors share no narrower base
        reason = " ".join(str(error).split())[:400]
        if "already registered" not in reason.lower():
            raise ProviderError(
                f"{path} cannot be loaded as a provider: {reason}. Expected a plugin library for onnxruntime "
                f"{runtime.__version__}, with the libraries that it needs"
            ) from error
    found = _devices(runtime, path)
    return found or [device for device in runtime.get_ep_devices() if _identity(device) not in before]


def _devices(runtime: Any, path: Path) -> list[Any]:
    """Return the devices whose provider says that it comes from this library."""
    return [
        device
        for device in runtime.get_ep_devices()
        if device.ep_metadata.get("library_path") == str(path)
        and device.device.metadata.get("is_virtual") != "1"
    ]


def _identity(device: Any) -> tuple[str, int, int, str]:
    hardware = device.device
    return (str(device.ep_name), int(hardware.vendor_id), int(hardware.device_id), str(hardware.type))
