"""A stand-in for the onnxruntime module, with a list of providers and devices of one's choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

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
