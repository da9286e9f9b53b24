"""Stages on devices of their own, played by the CPU: each has its memory, and there is a lane for each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llorch_export.graph.stage_choice import parse_stages
from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.stages import stage_artifacts
from llorch_serve.cache.kv_cache import MEMORY_SHARE
from llorch_serve.config import SessionConfig, StageChoice
from llorch_serve.errors import ResourceError
from llorch_serve.providers import CPU, ActiveProvider, Memory, ProviderChoice
from llorch_serve.providers.table import find_provider
from llorch_serve.runtime.memory_plan import loaded_bytes
from llorch_serve.runtime.opening import LoadReport
from llorch_serve.stages import loading, pipeline
from llorch_serve.stages.pipeline import Pipeline, open_pipeline
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, open_tiny
from support.fakes.played_memory import PlayedMemory
from support.harness.slot_calls import slot_calls

Opener = Callable[..., AbstractContextManager[Pipeline]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("devices")
    return export_tiny(write_hf_folder(folder / "source", {"num_hidden_layers": 4}), folder / "whole")


@pytest.fixture(scope="module")
def staged(whole: Artifact) -> Artifact:
    folder = whole.folder.parent
    return export_tiny(folder / "source", folder / "staged", stages=parse_stages("2,at=3"))


@pytest.fixture(params=["divisible", "whole"])
def opened(request: pytest.FixtureRequest, staged: Artifact, monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Return what opens the model. free: bytes of each device; their buffers can be divided, or not."""
    divisible = request.param == "divisible"
    cuda = find_provider("cuda")
    row = replace(
        find_provider("cpu"),
        memory=Memory.DEVICE,
        in_place=False,
        divisible=divisible,
        label="played",
        options=cuda.options,
    )

    def activate(choice: ProviderChoice, _runtime: Any) -> ActiveProvider:
        return ActiveProvider(CPU, row, dict(option.split("=") for option in choice.options))

    def open_on(
        devices: tuple[int, ...],
        free: tuple[int, ...] = (2**30, 2**30),
        tell: Callable[[LoadReport], None] = lambda _report: None,
        **options: Any,
    ) -> AbstractContextManager[Pipeline]:
        memories = [PlayedMemory(each) for each in free]
        for module in (loading, pipeline):
            monkeypatch.setattr(module, "activate", activate)
        monkeypatch.setattr(
            loading,
            "device_memory",
            lambda provider, _runtime: memories[provider.device_id] if divisible else None,
        )
        config = SessionConfig(
            threads=1, slots=6, max_context=48, provider=ProviderChoice("cuda"), stages=StageChoice(devices)
        )
        return closing(open_pipeline(staged, replace(config, **options), tell))

    return open_on


@pytest.mark.parametrize(("devices", "lanes"), [((0, 1), 2), ((1, 1), 1), ((), 1)])
def test_each_stage_is_on_its_device(
    whole: Artifact, opened: Opener, devices: tuple[int, ...], lanes: int
) -> None:
    expected = slot_calls(open_tiny(whole, slots=3))
    with opened(devices) as made:
        assert len(made.sessions) == lanes
        for lane in made.sessions:
            used = dict.fromkeys(devices or (0,))
            assert lane.placement.device == ", ".join(f"played:{number}" for number in used)
            for mine, one in zip(slot_calls(lane), expected, strict=True):
                np.testing.assert_array_equal(mine.view(np.uint32), one.view(np.uint32))


@pytest.mark.parametrize("opened", ["divisible"], indirect=True)
def test_the_device_with_least_room_decides(staged: Artifact, opened: Opener) -> None:
    weights = [loaded_bytes(view.manifest, CPU) for view in stage_artifacts(staged)]
    share = 6 * 80 * staged.manifest.kv.bytes_per_token  # the first stage, with 3 of 4 layers, has 3/4
    scarce, plenty = [int(each + 0.75 * share / MEMORY_SHARE) + 100 for each in weights], 2**30
    reports: list[LoadReport] = []
    for free in ((scarce[0], plenty), (plenty, scarce[1])):
        with opened((0, 1), free, reports.append, max_context=None):
            pass
    assert [report.capacity.context for report in reports] == [80, 128]
    assert [report.capacity.limited_by_memory for report in reports] == [True, False]
    with pytest.raises(ResourceError, match="6 slots of 48 tokens"), opened((0, 1), (plenty, weights[1])):
        pass
