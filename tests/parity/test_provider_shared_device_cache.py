"""A cache that all slots share on a device, played by the CPU: one call for many sequences gives the logits
of host memory's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llorch_serve.artifact.folder import Artifact
from llorch_serve.cache.shared_device_cache import SharedDeviceCache
from llorch_serve.errors import ProviderError, ResourceError
from llorch_serve.runtime.session import DecoderSession
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, open_tiny, random_ids
from support.fakes.played_memory import PlayedMemory
from support.harness.played_device import watched
from support.harness.slot_calls import slot_calls

Opener = Callable[..., DecoderSession]
UNRECORDED = ("enable_cuda_graph=0",)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("shared")
    return export_tiny(write_hf_folder(folder / "source"), folder / "out")


@pytest.fixture
def on_device(opened: Opener) -> Opener:
    return functools.partial(opened, UNRECORDED)


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


@pytest.mark.parametrize(
    ("rows", "copies"),
    [([0, 1, 2], 1), ([0, 2], 2), ([1, 2], 1), ([2, 1], 2), ([1], 1), ([2, 0, 1], 2)],
    ids=str,
)
def test_neighbouring_rows_of_logits_come_in_one_copy(
    on_device: Opener, memory: PlayedMemory, rows: list[int], copies: int
) -> None:
    session = on_device()
    expected = session.decode([7, 8, 9], [1, 1, 1])[rows]
    session.decode_greedy([7, 8, 9], [1, 1, 1])
    memory.reads = 0
    np.testing.assert_array_equal(session.step_logits(rows), expected)
    assert memory.reads == copies


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
