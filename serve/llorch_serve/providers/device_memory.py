"""A device's memory, as far as onnxruntime leaves it to others: how much is free, and copies of parts of a
buffer.

onnxruntime allocates and binds, says nothing of what a device has, and copies whole tensors. CUDA's own
runtime library does the rest; its provider has loaded it. Its functions and their arguments are those of
NVIDIA's CUDA Runtime API.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final, Protocol

import numpy.typing as npt

from llorch_serve.errors import ProviderError
from llorch_serve.providers.choose import ActiveProvider

_DEVICE_TO_HOST: Final = 2  # cudaMemcpyDeviceToHost
_DEVICE_TO_DEVICE: Final = 3  # cudaMemcpyDeviceToDevice


class DeviceMemory(Protocol):
    """Memory in which the address of a part of a buffer can be computed."""

    def free_bytes(self) -> int:
        """Return the bytes that nobody holds."""

    def copy(self, target: int, source: int, *, rows: int, width: int, pitch: int) -> None:
        """Begin to copy ``rows`` pieces of ``width`` bytes, whose starts are ``pitch`` bytes apart on both
        sides.
        """

    def wait(self) -> None:
        """Wait until the copies are done."""

    def read(self, target: npt.NDArray[Any], source: int) -> None:
        """Fill a contiguous array of the host's with what is at an address; returns when that is done."""


class CudaMemory:
    """The memory of one of CUDA's devices. library: libcudart, by ctypes.

    Every method raises ProviderError if CUDA fails.
    """

    def __init__(self, library: Any, device: int) -> None:
        self._library = library
        self._device = device
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def free_bytes(self) -> int:
        """Return the bytes that nobody holds."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def copy(self, target: int, source: int, *, rows: int, width: int, pitch: int) -> None:
        """Begin to copy ``rows`` pieces of ``width`` bytes, whose starts are ``pitch`` bytes apart on both
        sides.
        """
        to, fro, step = ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(pitch)
        size = (ctypes.c_size_t(width), ctypes.c_size_t(rows))
        self._call("cudaMemcpy2D", to, step, fro, step, *size, ctypes.c_int(_DEVICE_TO_DEVICE))

    def wait(self) -> None:
        """Wait until the copies are done: onnxruntime's streams do not wait for them."""
        self._call("cudaDeviceSynchronize")

    def read(self, target: npt.NDArray[Any], source: int) -> None:
        """Fill a contiguous array of the host's with what is at an address; returns when that is done."""
        assert target.flags.c_contiguous
        to, fro = ctypes.c_void_p(target.ctypes.data), ctypes.c_void_p(source)
        self._call("cudaMemcpy", to, fro, ctypes.c_size_t(target.nbytes), ctypes.c_int(_DEVICE_TO_HOST))

    def _call(self, name: str, *arguments: Any) -> None:
        # A thread has a device of its own, the first by default.
        for function, given in (("cudaSetDevice", (ctypes.c_int(self._device),)), (name, arguments)):
            code = getattr(self._library, function)(*given)
            if code:
                reason = self._library.cudaGetErrorString(code)
                raise ProviderError(
                    f"CUDA failed in {function} on device {self._device}: {reason.decode(errors='replace')} "
                    f"(error {code})"
                )


def device_memory(provider: ActiveProvider, runtime: Any) -> DeviceMemory | None:
    """Return the memory of a provider's device, or None where buffers cannot be divided by address.

    Raises ProviderError if CUDA's runtime library cannot be loaded.
    """
    if provider.row is None or not provider.row.divisible:
        return None
    major = str(runtime.cuda_version).split(".")[0]
    name = f"cudart64_{major}.dll" if sys.platform == "win32" else f"libcudart.so.{major}"
    try:
        return CudaMemory(ctypes.CDLL(name), provider.device_id)
    except OSError as error:
        raise ProviderError(
            f"{name} of CUDA {major} cannot be loaded: {error}; {provider.row.install} brings it"
        ) from error
