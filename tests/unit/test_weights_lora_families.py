"""Adapters of families whose modules have other names, or whose rotary pairs lie side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llorch_export.adapter.apply import with_adapters
from llorch_export.adapter.choice import AdapterChoice
from llorch_export.source.open import open_checkpoint
from support.builders.adapters import write_adapter
from support.builders.arch_rows import HF
from support.builders.checkpoints import tiny_llama_config, write_hf_folder


@pytest.mark.parametrize(
    ("row", "down"), [("phi", "mlp.fc2"), ("starcoder2", "mlp.c_proj"), ("gemma2", "mlp.down_proj")]
)
def test_an_adapter_is_merged_by_the_names_of_its_family(tmp_path: Path, row: str, down: str) -> None:
    source = open_checkpoint(str(write_hf_folder(tmp_path / "model", HF[row])))
    module = down.rpartition(".")[2]
    factors = write_adapter(
        tmp_path / "adapter",
        tiny_llama_config(**HF[row]),
        target_modules=["q_proj", "v_proj", module],
        edit=lambda stored: _rename(stored, "mlp.down_proj", down),
    )
    found = with_adapters(source, [AdapterChoice(tmp_path / "adapter")])
    for name in ("model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"):
        plain = source.tensors[f"{name}.weight"].load().astype(np.float64)
        added = 6 / 4 * factors[f"{name}.b"].astype(np.float64) @ factors[f"{name}.a"]
        np.testing.assert_array_equal(
            found.tensors[f"{name}.weight"].load(), (plain + added).astype(np.float32)
        )


def _rename(stored: dict[str, np.ndarray], old: str, new: str) -> None:
    for name in [name for name in stored if old in name]:
        stored[name.replace(old, new)] = stored.pop(name)


@pytest.mark.parametrize("row", ["glm", "cohere", "ernie4_5"])
def test_an_adapter_has_the_rows_of_queries_as_its_family_stores_them(tmp_path: Path, row: str) -> None:
    folder = write_hf_folder(tmp_path / "model", HF[row])
    factors = write_adapter(tmp_path / "adapter", tiny_llama_config(**HF[row]))
    name = "model.layers.1.self_attn.q_proj"

    def add(weights: dict[str, np.ndarray]) -> None:
        change = 6 / 4 * factors[f"{name}.b"].astype(np.float64) @ factors[f"{name}.a"]
        weights[f"{name}.weight"] = (weights[f"{name}.weight"] + change).astype(np.float32)

    source = open_checkpoint(str(folder))
    found = with_adapters(source, [AdapterChoice(tmp_path / "adapter")])
    expected = open_checkpoint(str(write_hf_folder(tmp_path / "merged", HF[row], edit=add)))
    whole = expected.tensors[f"{name}.weight"].load()
    np.testing.assert_array_equal(found.tensors[f"{name}.weight"].load(), whole)
    np.testing.assert_array_equal(found.tensors[f"{name}.weight"].load_rows(5, 23), whole[5:23])
