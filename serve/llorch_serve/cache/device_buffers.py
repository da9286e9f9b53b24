"""Buffers in a device's memory, and how a part of one is named to onnxruntime."""

from __future__ import annotations

from typing import Any, Final

from llorch_serve.artifact.manifest import KvDtype
from llorch_serve.errors import ProviderError, ResourceError
from llorch_serve.providers import ActiveProvider

# ONNX's numbers of element types; numpy has no bfloat16.
ELEMENT_TYPES: Final[dict[KvDtype, int]] = {"float32": 1, "int8": 3, "float16": 10, "bfloat16": 16}
FLOAT32: Final = 1
INT32: Final = 6
INT64: Final = 7
FLOAT64: Final = 11


class DeviceBuffers:
    """Makes buffers on a provider's device. runtime: onnxruntime."""

    def __init__(self, runtime: Any, provider: ActiveProvider) -> None:
        assert provider.row is not None
        self._runtime = runtime
        self._provider = provider
        self._row = provider.row

    def make(self, shape: tuple[int, ...], element: int, what: str) -> Any:
        """Return a buffer as onnxruntime's OrtValue.

        element: ONNX's number of its type. what: the buffer is for, in words.
        Raises ResourceError if the device has no memory left, ProviderError if it gave memory elsewhere.
        """
        make = self._runtime.OrtValue.ortvalue_from_shape_and_type
        try:
            if self._provider.devices:
                memory = self._provider.devices[0].memory_info(self._runtime.OrtDeviceMemoryType.DEFAULT)
                value = make(shape, element, memory_info=memory)
            else:
                value = make(shape, element, self._row.device_type, self._provider.device_id)
        except Exception as error:  # the runtime's own classes of errors share no narrower base
            raise ResourceError(
                f"{self._row.runtime_name} has no memory for {what} ({' '.join(str(error).split())[:200]}); "
                "choose a smaller --max-context or fewer --slots"
            ) from error
        found = value.device_name()
        if found != self._row.device_type:
            raise ProviderError(
                f"{self._row.runtime_name} was asked for memory of {self._row.device_type} and gave memory "
                f"of {found}; "
                "use another release of its wheel"
            )
        return value

    def part(
        self, shape: tuple[int, ...], element: int, address: int
    ) -> tuple[str, int, int, tuple[int, ...], int]:
        """Return the arguments by which onnxruntime's binding takes a part of a buffer, after its name."""
        return (self._row.device_type, self._provider.device_id, element, shape, address)
