"""Adapter folders as trainers leave them: spellings of keys, shards, copies, other tools' files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llorch_export.adapter.apply import with_adapters
from llorch_export.adapter.choice import AdapterChoice
from llorch_export.checkpoint.base import Checkpoint
from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import ArtifactError
from support.builders.adapters import Factors, write_adapter
from support.builders.checkpoints import tiny_llama_config, write_hf_folder

CONFIG = tiny_llama_config()
UP = "model.layers.1.self_attn.v_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(write_hf_folder(tmp_path_factory.mktemp("base") / "m")))


def merged(base: Checkpoint, path: Path) -> Checkpoint:
    return with_adapters(base, (AdapterChoice(path),))


def renamed(change: Callable[[str], str]) -> Callable[[Factors], None]:
    def edit(factors: Factors) -> None:
        old = dict(factors)
        factors.clear()
        factors.update({change(key): value for key, value in old.items()})

    return edit


@pytest.mark.parametrize(
    "change",
    [
        lambda key: key.replace(".weight", ".default.weight"),
        lambda key: key.replace(".weight", ".my-adapter_2.weight"),
        lambda key: key.removeprefix("base_model.model."),
        lambda key: f"_orig_mod.{key}",
        lambda key: key.replace("base_model.model.", "base_model.model._orig_mod."),
        lambda key: key.replace(".self_attn.", "._checkpoint_wrapped_module.self_attn."),
    ],
)
def test_every_spelling_of_keys_is_the_same_adapter(
    base: Checkpoint, tmp_path: Path, change: Callable[[str], str]
) -> None:
    write_adapter(tmp_path / "plain", CONFIG)
    write_adapter(tmp_path / "other", CONFIG, edit=renamed(change))
    expected = merged(base, tmp_path / "plain").tensors[f"{UP}.weight"].load()
    np.testing.assert_array_equal(merged(base, tmp_path / "other").tensors[f"{UP}.weight"].load(), expected)


def test_several_adapters_in_one_file_are_refused(base: Checkpoint, tmp_path: Path) -> None:
    write_adapter(
        tmp_path / "lora",
        CONFIG,
        edit=renamed(
            lambda key: key.replace(".weight", ".one.weight" if "layers.0" in key else ".two.weight")
        ),
    )
    with pytest.raises(ArtifactError, match="holds 2 adapters, one, two; save each"):
        merged(base, tmp_path / "lora")


def test_copies_of_the_base_weights_are_ignored_with_a_notice(base: Checkpoint, tmp_path: Path) -> None:
    def edit(factors: Factors) -> None:
        factors["base_model.model.lm_head.original_module.weight"] = np.ones((512, 64), np.float32)
        factors["base_model.model.lm_head.modules_to_save.default.weight"] = np.full((512, 64), 2, np.float32)

    write_adapter(tmp_path / "lora", CONFIG, edit=edit, modules_to_save=["lm_head"])
    checkpoint = merged(base, tmp_path / "lora")
    assert (checkpoint.tensors["lm_head.weight"].load() == 2).all()
    assert any("original_module" in notice for notice in checkpoint.adapters[0].notices)


def sharded(path: Path) -> dict[str, Any]:
    """Spread an adapter over two files; return the index."""
    tensors = load_file(path / "adapter_model.safetensors")
    (path / "adapter_model.safetensors").unlink()
    where = {}
    for number in (1, 2):
        name = f"adapter_model-0000{number}-of-00002.safetensors"
        part = {key: value for key, value in tensors.items() if (f"layers.{number - 1}." in key)}
        save_file(part, path / name)
        where |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": where}
    (path / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_a_sharded_adapter_is_merged_whole_or_refused(base: Checkpoint, tmp_path: Path) -> None:
    write_adapter(tmp_path / "plain", CONFIG)
    write_adapter(tmp_path / "lora", CONFIG)
    index = sharded(tmp_path / "lora")
    found = merged(base, tmp_path / "lora")
    for name, tensor in merged(base, tmp_path / "plain").tensors.items():
        np.testing.assert_array_equal(found.tensors[name].load(), tensor.load())
    assert len(found.adapters[0].content_files) == 4
    (tmp_path / "lora" / "adapter_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ArtifactError, match="lacks adapter_model-00002-of-00002"):
        merged(base, tmp_path / "lora")
    for where in ({}, {"a": 1}, {"a": "../x.safetensors"}, {"a": "x.bin"}):
        path = tmp_path / "lora" / "adapter_model.safetensors.index.json"
        path.write_text(json.dumps(index | {"weight_map": where}))
        with pytest.raises(ArtifactError):
            merged(base, tmp_path / "lora")


def test_a_pickle_is_refused_with_the_line_that_converts_it(base: Checkpoint, tmp_path: Path) -> None:
    write_adapter(tmp_path / "lora", CONFIG)
    (tmp_path / "lora" / "adapter_model.safetensors").rename(tmp_path / "lora" / "adapter_model.bin")
    with pytest.raises(ArtifactError, match=r"never read.*weights_only=True"):
        merged(base, tmp_path / "lora")


def test_other_tools_files_are_called_by_their_name(base: Checkpoint, tmp_path: Path) -> None:
    write_adapter(tmp_path / "mlx", CONFIG)
    (tmp_path / "mlx" / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "lora_parameters": {"rank": 8}})
    )
    with pytest.raises(ArtifactError, match=r"is of MLX.*mlx_lm\.fuse"):
        merged(base, tmp_path / "mlx")
    (tmp_path / "run").mkdir()
    write_adapter(tmp_path / "run" / "checkpoint-100", CONFIG)
    with pytest.raises(ArtifactError, match=r"Did you mean .*checkpoint-100"):
        merged(base, tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "notice"),
    [
        ({"merge_weights": False, "enable_lora": None}, "ignored: merge_weights"),
        ({"use_later_thing": False, "later_config": {}}, "ignored: later_config, use_later_thing"),
        ({"later_group_size": 16}, "ignored: later_group_size"),
        ({"base_model_name_or_path": "unsloth/m-unsloth-bnb-4bit"}, "quantised unsloth/m-unsloth-bnb-4bit"),
        ({"base_model_name_or_path": "other/model"}, "trained on other/model, and is merged into m"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying has no effect"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out has no effect"),
        ({"bias": "all"}, "the modules that it means have none"),
        ({"layers_pattern": "layers"}, "layers_pattern has no effect"),
        (
            {"target_modules": r"^(?!.*lm_head).*(q_proj|v_proj|down_proj)$"},
            "target_modules is an expression",
        ),
    ],
)
def test_what_has_no_effect_is_told(
    base: Checkpoint, tmp_path: Path, settings: dict[str, object], notice: str
) -> None:
    write_adapter(tmp_path / "lora", CONFIG, **{"base_model_name_or_path": "org/M", **settings})
    found = merged(base, tmp_path / "lora").adapters[0].notices
    assert len(found) == 1
    assert notice in found[0]


def test_nothing_is_told_of_a_plain_adapter_of_this_model(base: Checkpoint, tmp_path: Path) -> None:
    write_adapter(tmp_path / "lora", CONFIG, base_model_name_or_path="org/M/")
    assert merged(base, tmp_path / "lora").adapters[0].notices == ()
