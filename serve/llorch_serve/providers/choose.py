"""From what a person asks for to a provider that is ready: found in the table, present on this machine, its
options checked.

:func:`activate` is the only way to a provider; what it returns adds it to a session's options.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from llorch_serve.errors import ProviderError, UsageError
from llorch_serve.providers.libraries import available, missing_libraries, preload
from llorch_serve.providers.options import read_options
from llorch_serve.providers.plugins import register, wheel_library
from llorch_serve.providers.runtime import installed_runtimes, version_of
from llorch_serve.providers.table import CPU, CUDA_GRAPHS, Memory, Provider, find_provider

_SOFTWARE_ADAPTER: Final = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"
_DEVICE_OPTIONS: Final = ("device_id", "deviceId")


@dataclass(frozen=True, slots=True)
class ProviderChoice:
    """What a person asks for.

    name: as ``--provider`` takes it; None: the CPU, or the only provider of ``library``.
    options: ``KEY=VALUE`` texts. library: a plugin library. allow_cpu_nodes: nodes may run on the CPU's
        provider as well.
    """

    name: str | None = None
    options: tuple[str, ...] = ()
    library: Path | None = None
    allow_cpu_nodes: bool = False


@dataclass(frozen=True, slots=True)
class ActiveProvider:
    """A provider that this process can use.

    row: None for a plugin that the table does not know. devices: onnxruntime's, of a plugin; empty for one
        that is built in.
    """

    runtime_name: str
    row: Provider | None
    options: dict[str, str]
    devices: tuple[Any, ...] = ()

    @property
    def memory(self) -> Memory:
        """Where keys and values are kept."""
        return Memory.HOST if self.row is None else self.row.memory

    @property
    def in_place(self) -> bool:
        """Whether its kernels read host memory where it lies."""
        return self.row is not None and self.row.in_place

    @property
    def captures(self) -> bool:
        """Whether it is asked to record the kernels of calls and replay them."""
        return self.options.get(CUDA_GRAPHS) == "1"

    def with_captures(self) -> ActiveProvider:
        """Return the same provider for steps that are made again and again: it records them, if it can and
        no option says otherwise.
        """
        if self.row is None or CUDA_GRAPHS not in self.row.options or CUDA_GRAPHS in self.options:
            return self
        return replace(self, options={**self.options, CUDA_GRAPHS: "1"})

    def without_captures(self) -> ActiveProvider:
        """Return the same provider for calls that are made once."""
        return replace(
            self, options={key: value for key, value in self.options.items() if key != CUDA_GRAPHS}
        )

    @property
    def device_id(self) -> int:
        """The number of the device, among those of its kind."""
        return next((int(self.options[key]) for key in _DEVICE_OPTIONS if key in self.options), 0)

    @property
    def device(self) -> str:
        """The device that it runs on, like ``cpu`` or ``cuda:1``; OpenVINO's as the options name it."""
        if self.row is None:
            return self.runtime_name.removesuffix("ExecutionProvider").lower()
        label = self.row.label or self.row.name
        if any(key in self.row.options for key in _DEVICE_OPTIONS):
            return f"{label}:{self.device_id}"
        return self.options.get("device_type", label).lower()

    def memory_limit(self, free: int) -> int:
        """Return the bytes that it may take of ``free``: fewer, if an option says so."""
        return min(free, int(self.options.get("gpu_mem_limit", free)))

    def add_to(self, session_options: Any) -> dict[str, Any]:
        """Add it to a session's options; return the arguments that InferenceSession takes beside them.

        A provider with threads of its own is given as many as the session has.
        """
        options = dict(self.options)
        if self.row is not None and self.row.threads is not None:
            options.setdefault(self.row.threads, str(session_options.intra_op_num_threads))
        if self.devices:
            session_options.add_provider_for_devices([self.devices[0]], options)
            return {"enable_fallback": False}
        return {"providers": [(self.runtime_name, options)], "enable_fallback": False}


def require_unrecorded(provider: ActiveProvider, what: str) -> None:
    """Raise UsageError if kernels are to be recorded where no call is. what: is opened, in words."""
    if provider.captures:
        raise UsageError(
            f"--provider-option {CUDA_GRAPHS}=1 has no effect on {what}, whose calls are not recorded; "
            "leave it out"
        )


def activate(choice: ProviderChoice, runtime: Any) -> ActiveProvider:
    """Make a provider ready. runtime: onnxruntime, of which nothing else is kept.

    Raises ProviderError for a name or an option that does not exist, and for a provider that is not here,
    with what brings it; UsageError for a choice without effect.
    """
    if choice.library is not None:
        return _from_library(choice, choice.library, runtime)
    row = find_provider(choice.name or "cpu")
    options = read_options(row.name, row.options, choice.options)
    if row.runtime_name == CPU:
        if choice.allow_cpu_nodes:
            raise UsageError(
                "--allow-cpu-nodes has no effect on the cpu provider, where all nodes are; leave it out, or "
                "name a --provider"
            )
        return ActiveProvider(CPU, row, options)
    if row.plugin is None:
        if row.name == "cuda" and row.runtime_name in available(runtime):
            preload(runtime)
        if row.runtime_name not in available(runtime) or missing_libraries(row, runtime):
            raise absent(row, runtime)
        return ActiveProvider(row.runtime_name, row, options)
    library = wheel_library(row.plugin)
    if library is None:
        raise absent(row, runtime)
    devices = [device for device in register(runtime, library) if device.ep_name == row.runtime_name]
    if not devices:
        raise absent(row, runtime)
    return ActiveProvider(row.runtime_name, row, options, _selected(row.name, devices, options))


def _from_library(choice: ProviderChoice, library: Path, runtime: Any) -> ActiveProvider:
    devices = register(runtime, library)
    found = sorted({str(device.ep_name) for device in devices})
    if not found:
        raise ProviderError(
            f"{library} is loaded and offers no device on this machine; available here: "
            f"{_list(available(runtime))}"
        )
    wanted = found[0] if len(found) == 1 else ""
    row: Provider | None = None
    if choice.name is not None:
        wanted = choice.name if choice.name in found else find_provider(choice.name).runtime_name
    if wanted not in found:
        asked = f"--provider {choice.name}" if choice.name else "--provider is needed"
        raise ProviderError(f"{asked}: {library} offers {_list(found)}; name one of them")
    try:
        row = find_provider(wanted)
    except ProviderError:
        row = None
    options = read_options(wanted, None if row is None else row.options, choice.options)
    mine = [device for device in devices if device.ep_name == wanted]
    return ActiveProvider(wanted, row, options, _selected(wanted, mine, options))


def _selected(name: str, devices: Sequence[Any], options: dict[str, str]) -> tuple[Any, ...]:
    """Return the one device that the options name, the first by default."""
    key = next((key for key in _DEVICE_OPTIONS if key in options), None)
    index = 0 if key is None else int(options[key])
    if index >= len(devices):
        raise ProviderError(
            f"--provider-option {key} is {index} and {name} has {len(devices)} devices here; "
            f"choose 0 to {len(devices) - 1}"
        )
    return (devices[index],)


def absent(row: Provider, runtime: Any) -> ProviderError:
    """Return the error for a provider that is not here: what brings it, what is missing, and what there
    is.
    """
    has = version_of(row.wheel) is not None
    if sys.platform not in row.systems:
        fault = f"its wheel {row.wheel} is for {_list(row.systems)}, and this is {sys.platform}"
    elif not has:
        fault = f"the wheel {row.wheel} is not installed{_instead(row)}; {_how(row)}"
    else:
        fault = f"the wheel {row.wheel} {version_of(row.wheel)} is installed and finds no device"
    missing = missing_libraries(row, runtime)
    lacks = f"; missing libraries: {', '.join(map(str, missing))}" if missing else ""
    hint = ""
    if row.name == "webgpu" and has and not missing and _SOFTWARE_ADAPTER not in os.environ:
        hint = f"; a Vulkan driver in software is used with {_SOFTWARE_ADAPTER}=1"
    return ProviderError(
        f"{row.runtime_name} is not available for --provider {row.name}: {fault}{lacks}{hint}; "
        f"available here: {_list(available(runtime))}"
    )


def _how(row: Provider) -> str:
    others = [name for name in installed_runtimes() if name != row.wheel]
    if row.plugin is None and others:
        return f"install it in place of that one: pip uninstall -y {' '.join(others)} && {row.install}"
    return f"install it: {row.install}"


def _instead(row: Provider) -> str:
    """Return which wheel brings the runtime, where the provider's own would take its place."""
    if row.plugin is not None:
        return ""
    wheels = [f"{name} {importlib.metadata.version(name)}" for name in installed_runtimes()]
    return f" ({_list(wheels)} is)" if wheels else " (the onnxruntime here is of no known wheel)"


def _list(values: Sequence[str]) -> str:
    return ", ".join(values) or "none"
