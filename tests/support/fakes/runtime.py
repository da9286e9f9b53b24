"""Stand-ins for the onnxruntime module: with chosen providers and devices, or with changed outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import onnxruntime

from llorch_serve.providers import CPU


@dataclass
class FakeRuntime:
    """What choosing a provider asks of onnxruntime.

    built_in: providers of the wheel. offered: by a plugin library's file name, the names of its providers,
        once a device.
    """

    built_in: tuple[str, ...] = (CPU,)
    offered: dict[str, tuple[str, ...]] = field(default_factory=dict)
    refuses: str = ""
    cuda_version: str = ""
    __version__: str = "1.32.0"
    registered: list[str] = field(default_factory=list)
    devices: list[Any] = field(default_factory=list)

    def get_available_providers(self) -> list[str]:
        return ["AzureExecutionProvider", *self.built_in]

    def get_ep_devices(self) -> list[Any]:
        return list(self.devices)

    def register_execution_provider_library(self, name: str, path: str) -> None:
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.registered.append(path)
        for index, provider in enumerate(self.offered.get(path.rpartition("/")[2], ())):
            hardware = SimpleNamespace(vendor_id=1, device_id=index, type="GPU", metadata={})
            metadata = {"library_path": path}
            self.devices.append(SimpleNamespace(ep_name=provider, ep_metadata=metadata, device=hardware))


class ChangedRuntime:
    """onnxruntime, whose sessions give what ``change`` makes of their outputs."""

    def __init__(self, change: Callable[[list[Any]], list[Any]]) -> None:
        self.change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(onnxruntime, name)

    def InferenceSession(self, *arguments: Any, **named: Any) -> Any:  # noqa: N802 - onnxruntime's name
        session = onnxruntime.InferenceSession(*arguments, **named)
        return SimpleNamespace(
            get_providers=session.get_providers,
            get_provider_graph_assignment_info=session.get_provider_graph_assignment_info,
            run=lambda *given: self.change(session.run(*given)),
        )
