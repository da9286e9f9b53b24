"""CUDA's runtime library, played: what it is asked, and what becomes of its errors."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llorch_serve.errors import ProviderError
from llorch_serve.providers import ActiveProvider
from llorch_serve.providers import device_memory as module
from llorch_serve.providers.device_memory import CudaMemory, device_memory
from llorch_serve.providers.table import find_provider


class Function:
    """One of the library's. ctypes sets attributes of such."""

    def __init__(self, name: str, library: Library) -> None:
        self.name = name
        self.library = library
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self.name == "cudaGetErrorString":
            return b"out of memory"
        self.library.calls.append((self.name, *(getattr(value, "value", value) for value in arguments)))
        if self.name == "cudaMemGetInfo":
            for value, size in zip(arguments, (5 * 2**30, 8 * 2**30), strict=True):
                ctypes.cast(value, ctypes.POINTER(ctypes.c_size_t))[0] = size
        return self.library.fails.get(self.name, 0)


class Library:
    """libcudart."""

    def __init__(self, **fails: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Function:
        function = Function(name, self)
        setattr(self, name, function)
        return function


def test_free_memory_is_that_of_the_chosen_device() -> None:
    library = Library()
    assert CudaMemory(library, 1).free_bytes() == 5 * 2**30
    assert library.calls[0] == ("cudaSetDevice", 1)
    assert library.calls[1][0] == "cudaMemGetInfo"


def test_a_copy_is_one_of_rows_within_the_device() -> None:
    library = Library()
    memory = CudaMemory(library, 0)
    memory.copy(2**40, 2**41, rows=3, width=64, pitch=256)
    memory.wait()
    assert library.calls == [
        ("cudaSetDevice", 0),
        ("cudaMemcpy2D", 2**40, 256, 2**41, 256, 64, 3, 3),
        ("cudaSetDevice", 0),
        ("cudaDeviceSynchronize",),
    ]


def test_what_is_read_comes_to_an_array_of_the_hosts() -> None:
    library, found = Library(), np.zeros((3, 4), np.float32)
    CudaMemory(library, 2).read(found[:2], 2**40)
    device_to_host = 2
    assert library.calls == [
        ("cudaSetDevice", 2),
        ("cudaMemcpy", found.ctypes.data, 2**40, 32, device_to_host),
    ]


def test_a_failure_is_named() -> None:
    memory = CudaMemory(Library(cudaMemcpy2D=2), 1)
    with pytest.raises(
        ProviderError, match=r"CUDA failed in cudaMemcpy2D on device 1: out of memory \(error 2\)"
    ):
        memory.copy(0, 0, rows=1, width=1, pitch=1)


def active(name: str, **options: str) -> ActiveProvider:
    row = find_provider(name)
    return ActiveProvider(row.runtime_name, row, options)


def test_only_memory_that_can_be_divided_is_opened() -> None:
    for name in ("cpu", "webgpu", "directml", "tensorrt"):
        assert device_memory(active(name), SimpleNamespace()) is None
    assert device_memory(ActiveProvider("OtherExecutionProvider", None, {}), SimpleNamespace()) is None


@pytest.mark.parametrize(("system", "name"), [("linux", "libcudart.so.13"), ("win32", "cudart64_13.dll")])
def test_the_library_is_that_of_the_runtimes_cuda(
    monkeypatch: pytest.MonkeyPatch, system: str, name: str
) -> None:
    library, loaded = Library(), []

    def load(wanted: str) -> Library:
        loaded.append(wanted)
        return library

    monkeypatch.setattr(module.ctypes, "CDLL", load)
    monkeypatch.setattr(module.sys, "platform", system)
    memory = device_memory(active("cuda", device_id="3"), SimpleNamespace(cuda_version="13.0"))
    assert memory is not None
    memory.free_bytes()
    assert loaded == [name]
    assert library.calls[0] == ("cudaSetDevice", 3)


def test_a_library_that_is_missing_is_named_with_what_brings_it() -> None:
    with pytest.raises(
        ProviderError, match=r"of CUDA 99 cannot be loaded: .*; pip install 'llorch\[cuda\]' brings it"
    ):
        device_memory(active("cuda"), SimpleNamespace(cuda_version="99.1"))
