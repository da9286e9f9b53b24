"""The keyword arguments of ``import llorch`` are all there is to set, and nothing else."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from llorch.exporting import ExportSettings
from llorch.settings import FORMS, LoadSettings, SamplingSettings, engine_config, sampling_params
from llorch_export.options import ExportOptions
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.providers import ProviderChoice
from llorch_serve.sampling.params import SamplingParams


def names(dataclass: type) -> set[str]:
    return {field.name for field in fields(dataclass)}


def test_every_field_of_a_request_is_a_setting():
    assert SamplingSettings.__annotations__.keys() == names(SamplingParams) - {"structured"} | {*FORMS}


def test_every_setting_of_loading_is_a_field():
    ours = names(SessionConfig) - {"provider", "stages"} | names(EngineConfig) - {"session"}
    # Whose requests share what is cached, and what clients call the model: there is one caller in a process.
    assert LoadSettings.__annotations__.keys() == ours - {"cache_sharing", "served_names", "rank_format"} | {
        "provider",
        "provider_options",
        "provider_library",
        "allow_cpu_nodes",
        "stage_devices",
        "stage_processes",
    }


def test_every_option_of_an_export_is_a_setting():
    own = {"source", "output", "lora", "rules", "prompts"}  # arguments of their own, and what recipes say
    own.add("two_bit_accuracy_level")  # what the checkpoint says
    assert ExportSettings.__annotations__.keys() == names(ExportOptions) - own


def test_settings_become_what_they_name(tmp_path: Path):
    config = engine_config(
        {
            "slots": 3,
            "lookup": 4,
            "draft": str(tmp_path),
            "provider": "cpu",
            "provider_options": {"a": "b"},
            "provider_library": tmp_path / "plugin.so",
            "allow_cpu_nodes": True,
        }
    )
    assert config == EngineConfig(
        session=SessionConfig(
            slots=3, provider=ProviderChoice("cpu", ("a=b",), tmp_path / "plugin.so", allow_cpu_nodes=True)
        ),
        lookup=4,
        draft=tmp_path,
    )
    assert engine_config({}) == EngineConfig()
    assert sampling_params({}) == SamplingParams()
    assert sampling_params({"stop": "end", "top_k": 3}) == SamplingParams(stop=("end",), top_k=3)


@pytest.mark.parametrize("name", ["threads", "slots", "max_context", "prefill_chunk", "max_waiting_tokens"])
def test_a_number_that_is_none_is_refused(name: str):
    with pytest.raises(ValueError, match=f"{name} is 0, expected at least 1"):
        engine_config({name: 0})  # type: ignore[misc]
