"""A cache on a device, played by the CPU: a slot's own buffers, bound anew in each call, give the logits of
shared ones.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import KvLayout
from llorch_serve.cache.device_cache import DeviceCache
from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.errors import ProviderError, ResourceError
from llorch_serve.providers import CPU, ActiveProvider, Memory
from llorch_serve.providers.table import find_provider
from llorch_serve.runtime import opening as session_module
from llorch_serve.runtime.session import DecoderSession
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, open_tiny
from support.harness.slot_calls import slot_calls

KV = KvLayout(layers=2, kv_heads=2, head_dim=16)
CAPACITY = KvCapacity(slots=2, context=8, bytes_per_token=KV.bytes_per_token, budget=16)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("device")
    return export_tiny(write_hf_folder(folder / "source"), folder / "out")


@pytest.fixture
def on_device(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> DecoderSession:
    row = replace(find_provider("cpu"), memory=Memory.DEVICE, in_place=False)
    monkeypatch.setattr(session_module, "activate", lambda choice, runtime: ActiveProvider(CPU, row, {}))
    return open_tiny(artifact, slots=3)


def test_it_computes_what_a_cache_in_host_memory_does(artifact: Artifact, on_device: DecoderSession) -> None:
    assert isinstance(on_device.cache, DeviceCache)
    assert not on_device.capabilities.batched_decode
    for mine, expected in zip(slot_calls(on_device), slot_calls(open_tiny(artifact, slots=3)), strict=True):
        assert mine.shape == expected.shape
        np.testing.assert_allclose(mine, expected, atol=1e-5)


class Value:
    def __init__(self, device: str) -> None:
        self.device = device

    def device_name(self) -> str:
        return self.device


def cuda(make: Any) -> DeviceCache:
    runtime = SimpleNamespace(OrtValue=SimpleNamespace(ortvalue_from_shape_and_type=make))
    row = find_provider("cuda")
    return DeviceCache(KV, CAPACITY, runtime, ActiveProvider(row.runtime_name, row, {"device_id": "1"}))


class Binding:
    def __init__(self) -> None:
        self.bound: dict[str, Value] = {}

    def bind_ortvalue_input(self, name: str, value: Value) -> None:
        self.bound[name] = value

    bind_ortvalue_output = bind_ortvalue_input


def test_past_and_present_are_one_buffer_on_the_chosen_device_and_a_swap_moves_none() -> None:
    asked: list[tuple[Any, ...]] = []

    def make(*arguments: Any) -> Value:
        asked.append(arguments)
        return Value("cuda")

    cache = cuda(make)
    first = Binding()
    cache.bind(first, 0, 1)
    assert asked == [((1, 2, 8, 16), 1, "cuda", 1)] * 4, "one slot's buffers, when it is first used"
    assert first.bound["past_key_values.1.key"] is first.bound["present.1.key"]
    assert len({id(value) for value in first.bound.values()}) == 4
    cache.swap(0, 1, 3)
    assert cache.place(1, 1) == (0, 1)
    second = Binding()
    cache.bind(second, 1, 1)
    assert second.bound == first.bound
    assert len(asked) == 4


def test_memory_elsewhere_is_refused() -> None:
    with pytest.raises(ProviderError, match="was asked for memory of cuda and gave memory of cpu"):
        cuda(lambda *_arguments: Value("cpu")).bind(Binding(), 0, 1)


def test_a_full_device_is_named() -> None:
    def make(*arguments: Any) -> Value:
        raise RuntimeError("Failed to allocate\n memory")

    with pytest.raises(ResourceError, match=r"one more sequence of 8 tokens \(Failed to allocate memory"):
        cuda(make).bind(Binding(), 0, 1)


def test_a_copy_that_the_runtime_refuses_is_a_providers_error() -> None:
    class Stubborn(Value):
        def update_inplace(self, value: Value) -> None:
            raise RuntimeError("no such\n copy")

    with pytest.raises(ProviderError, match=r"failed to copy a sequence's cache: no such copy"):
        cuda(lambda *_arguments: Stubborn("cuda")).copy(0, 1, 3)
