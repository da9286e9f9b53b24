"""A cache that all slots share on a device, played by the CPU: one call for many sequences gives the logits
of host memory's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llorch_serve.artifact.folder import Artifact
from llorch_serve.cache.shared_device_cache import SharedDeviceCache
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ProviderError, ResourceError
from llorch_serve.providers import CPU, ActiveProvider, Memory
from llorch_serve.providers.table import CUDA_GRAPHS, find_provider
from llorch_serve.runtime import opening as session_module
from llorch_serve.runtime.device_graph import DeviceGraph
from llorch_serve.runtime.opening import open_session
from llorch_serve.runtime.session import DecoderSession
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, open_tiny, random_ids
from support.fakes.played_memory import PlayedMemory
from support.harness.slot_calls import slot_calls

Opener = Callable[..., DecoderSession]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("shared")
    return export_tiny(write_hf_folder(folder / "source"), folder / "out")


@pytest.fixture
def memory() -> PlayedMemory:
    return PlayedMemory()


@pytest.fixture
def on_device(artifact: Artifact, memory: PlayedMemory, monkeypatch: pytest.MonkeyPatch) -> Opener:
    row = replace(find_provider("cpu"), memory=Memory.DEVICE, in_place=False, divisible=True)
    monkeypatch.setattr(session_module, "device_memory", lambda provider, runtime: memory)

    def opened(options: dict[str, str] | None = None, **config: Any) -> DecoderSession:
        active = ActiveProvider(CPU, row, options or {})
        monkeypatch.setattr(session_module, "activate", lambda choice, runtime: active)
        settings: dict[str, Any] = {"threads": 1, "slots": 3, **config}
        return open_session(artifact, SessionConfig(**settings), lambda report: None)

    return opened


def test_it_computes_what_a_cache_in_host_memory_does(
    artifact: Artifact, on_device: Opener, memory: PlayedMemory
) -> None:
    session = on_device()
    assert isinstance(session.cache, SharedDeviceCache)
    assert session.capabilities.batched_decode
    for mine, expected in zip(slot_calls(session), slot_calls(open_tiny(artifact, slots=3)), strict=True):
        assert mine.shape == expected.shape
        np.testing.assert_allclose(mine, expected, atol=1e-5)
    assert memory.waiting == 0, "every copy was waited for"


def test_a_copy_leaves_what_the_target_holds_beyond_it(on_device: Opener) -> None:
    session = on_device()
    alone = session.prefill(0, random_ids(8), 0, range(8)).copy()
    session.prefill(1, random_ids(8, seed=2), 0)
    session.copy_slot(1, 2, 8)
    session.copy_slot(0, 2, 5)
    np.testing.assert_allclose(session.prefill(2, random_ids(8)[5:], 5, range(3)), alone[5:], atol=1e-5)
    np.testing.assert_allclose(session.prefill(0, random_ids(8)[5:], 5, range(3)), alone[5:], atol=1e-5)


class Recorded:
    """A session of onnxruntime's that notes how it is run."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.recordings: list[str | None] = []

    def io_binding(self) -> Any:
        return self.session.io_binding()

    def run_with_iobinding(self, io: Any, options: Any) -> None:
        self.recordings.append(None if options is None else options.get_run_config_entry("gpu_graph_id"))
        self.session.run_with_iobinding(io, options)


def watched(session: DecoderSession) -> Recorded:
    """Return the session's runtime session, watched from now on."""
    graph = session._decode
    assert isinstance(graph, DeviceGraph)
    found = Recorded(graph._session)
    graph._session = graph._prompts._session = found
    return found


def test_steps_are_recorded_by_their_number_of_sequences_and_prompts_never(
    artifact: Artifact, on_device: Opener
) -> None:
    session = on_device({CUDA_GRAPHS: "1"})
    seen = watched(session)
    for mine, expected in zip(slot_calls(session), slot_calls(open_tiny(artifact, slots=3)), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-5)
    assert seen.recordings == ["-1", "-1", "-1", "2", "3", "-1", "1", "2"]


def test_a_recorded_step_is_told_the_longest_length(on_device: Opener) -> None:
    for options, told in (({CUDA_GRAPHS: "1"}, 64), ({CUDA_GRAPHS: "0"}, 6), ({}, 6)):
        session = on_device(options, max_context=64)
        seen = watched(session)
        session.prefill(0, random_ids(5), 0)
        session.decode([7], [6])
        graph = session._decode
        assert isinstance(graph, DeviceGraph)
        assert int(graph._steps[1]._total) == told
        assert seen.recordings == (["-1", "1"] if told == 64 else [None, None])


def test_the_memory_of_all_slots_is_planned_within_the_devices(
    on_device: Opener, memory: PlayedMemory, artifact: Artifact
) -> None:
    per_token = artifact.manifest.kv.bytes_per_token
    context = artifact.manifest.context_length
    weights = sum(entry.bytes for entry in artifact.manifest.files)
    memory.free = weights + int(1.25 * 3 * context * per_token) + 1000
    assert on_device().capacity.context == context
    memory.free = weights + int(1.25 * 3 * context * per_token) // 2
    assert 0.45 * context < on_device().capacity.context <= 0.5 * context
    with pytest.raises(
        ResourceError, match=rf"3 slots of {context} tokens .* smaller --max-context or fewer --slots"
    ):
        on_device(max_context=context)


def test_a_step_that_fails_is_a_providers_error(on_device: Opener) -> None:
    session = on_device()
    seen = watched(session)
    session.prefill(0, random_ids(5), 0)
    session.decode([7], [6])

    def broken(io: Any, options: Any) -> None:
        raise RuntimeError("CUDA failure 700\nat line 1")

    seen.run_with_iobinding = broken  # type: ignore[method-assign]
    with pytest.raises(ProviderError, match=r"failed in a step: CUDA failure 700$"):
        session.decode([7], [7])
