"""What an export of a family is limited to, and how fused tensors are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llorch_export.options import ExportOptions
from llorch_export.preview import preview
from llorch_export.resolved import resolve_context
from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import ArtifactError, UsageError
from support.builders.arch_rows import HF, LONG, SHORT
from support.builders.checkpoints import (
    of_family,
    tiny_llama_config,
    tiny_weights,
    write_gguf,
    write_hf_folder,
)
from support.builders.tiny_exports import export_tiny

LONGROPE = HF["phi3, longrope, all short"]  # 256 positions, 128 before extension


def test_the_context_ends_where_one_rotary_table_does() -> None:
    config = tiny_llama_config(**LONGROPE)
    assert (resolve_context(config, None), resolve_context(config, 128)) == (128, 128)
    with pytest.raises(
        UsageError, match=r"--max-context is 129.*longrope.*beyond 128.*Use --max-context 128 or less"
    ):
        resolve_context(config, 129)
    with pytest.raises(UsageError, match=r"this model takes 2 to 256"):
        resolve_context(config, 257)


def test_dynamic_scaling_begins_beyond_the_context() -> None:
    config = tiny_llama_config(**HF["dynamic"])
    assert resolve_context(config, None) == config.max_position_embeddings == 128


def test_an_artifact_and_a_preview_have_the_exact_context(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model", LONGROPE)
    assert export_tiny(source, tmp_path / "out").manifest.context_length == 128
    assert preview(ExportOptions(source=str(source), output=tmp_path / "x"))["context_length"] == 128


@pytest.mark.parametrize("weight_type", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"])
def test_parts_of_a_fused_tensor_are_its_rows(tmp_path: Path, weight_type: str) -> None:
    """Quantisation works along the rows, so it is the same whether a matrix is stored alone or in a fused
    one.
    """
    overrides = of_family("phi3")
    source = write_gguf(tmp_path / "m.gguf", overrides, weight_type=weight_type)
    tensors = open_checkpoint(str(source)).tensors
    kind = gguf.GGMLQuantizationType[weight_type]
    weights = tiny_weights(tiny_llama_config(**overrides))
    assert set(tensors) == set(weights)
    for name, value in weights.items():
        matrix = value.ndim == 2
        expected = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind) if matrix else value
        np.testing.assert_array_equal(tensors[name].load(), expected, err_msg=name)
        assert tensors[name].dtype == (weight_type if matrix else "F32")


def test_fused_tensors_of_a_folder_are_split(tmp_path: Path) -> None:
    overrides = of_family("phi3")
    tensors = open_checkpoint(str(write_hf_folder(tmp_path / "model", overrides))).tensors
    weights = tiny_weights(tiny_llama_config(**overrides))
    assert set(tensors) == set(weights)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.load(), weights[name], err_msg=name)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda w: w.pop("model.layers.1.self_attn.qkv_proj.weight"), r"lacks 1 of "
            r".*layers.1.self_attn.qkv_proj.weight"),
        (lambda w: w.update({"model.layers.0.mlp.gate_up_proj.weight": np.zeros((191, 64), np.float32)}), r"gate_up_proj.weight is \[191, 64\], expected \[192, "
            r"64\]"),
        (lambda w: w.update({"model.layers.0.self_attn.q_proj.weight": np.zeros((64, 64), np.float32)}), r"no use for: model.layers.0.self_attn.q_proj.weight"),
    ],
)  # fmt: skip
def test_wrong_fused_tensors_are_named(tmp_path: Path, change: Any, found: str) -> None:
    folder = write_hf_folder(tmp_path / "model", of_family("phi3"))
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=found):
        open_checkpoint(str(folder))


def test_rotary_divisors_of_unreasonable_size_are_refused_before_they_are_read(tmp_path: Path) -> None:
    table = np.ones(4096, np.float32)
    source = write_gguf(tmp_path / "m.gguf", of_family("phi3"), extra={"rope_factors_long.weight": table})
    with pytest.raises(ArtifactError, match=r"rope_factors_long.weight has shape \[4096\]"):
        open_checkpoint(str(source))


def test_the_rows_use_every_pair() -> None:
    """Guards the tables that many tests share: short and long must differ, or nothing would be tested."""
    assert len(SHORT) == len(LONG) == 8
    assert all(short != long for short, long in zip(SHORT[1:], LONG[1:], strict=True))


def test_a_context_whose_tables_would_be_huge_is_refused_with_one_that_is_not() -> None:
    config = tiny_llama_config(max_position_embeddings=2**26)  # heads of 16
    with pytest.raises(
        UsageError, match=r"tables of 4096 MiB, expected at most 1024; use --max-context 16777216"
    ):
        resolve_context(config, None)
    assert resolve_context(config, 2**24) == 2**24
    with pytest.raises(UsageError, match="--max-context 16777216 or less"):
        resolve_context(config, 2**24 + 1)
