"""``--dry-run``: exact shapes and sizes of published models, from their config alone."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from llorch_export.options import ExportOptions
from llorch_export.preview import preview
from llorch_serve.errors import ArtifactError, UsageError

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


def previewed(name: str, **options: Any) -> Any:
    return preview(ExportOptions(source=str(CONFIGS / name), output=Path("nowhere"), **options))


# Parameter counts as published; bytes of KV cache a token: 2 x layers x kv heads x head size x 4.
@pytest.mark.parametrize(
    ("name", "parameters", "layers", "kv_heads", "context"),
    [
        ("llama-2-7b", 6_738_415_616, 32, 32, 4096),
        ("llama-2-13b", 13_015_864_320, 40, 40, 4096),
        ("llama-2-70b", 68_976_648_192, 80, 8, 4096),
        ("llama-3-8b", 8_030_261_248, 32, 8, 8192),
        ("llama-3-70b", 70_553_706_496, 80, 8, 8192),
        ("llama-3.1-8b", 8_030_261_248, 32, 8, 131072),
    ],
)
def test_published_models_have_their_exact_size(
    name: str, parameters: int, layers: int, kv_heads: int, context: int
) -> None:
    found = previewed(name)
    assert found["parameters"] == parameters
    assert sum(math.prod(tensor["shape"]) for tensor in found["tensors"]) == parameters
    assert len(found["tensors"]) == 9 * layers + 3
    assert found["context_length"] == context
    assert found["kv_bytes_per_token"] == 2 * layers * kv_heads * 128 * 4
    inputs = {spec["name"]: spec for spec in found["inputs"]}
    assert len(inputs) == 4 + 2 * layers
    assert inputs[f"past_key_values.{layers - 1}.value"] == {
        "name": f"past_key_values.{layers - 1}.value",
        "shape": ["slots", kv_heads, "capacity", 128],
        "dtype": "float32",
    }


@pytest.mark.parametrize(
    ("options", "bytes_per_weight"),
    [
        ({"precision": "fp32"}, 4),
        ({"precision": "int8"}, 1 + 4 / 32),
        ({"precision": "int8", "block_size": 128}, 1 + 4 / 128),
        ({"precision": "int4", "head_precision": "int4", "block_size": 64}, 0.5 + 2.5 / 64),
        (
            {
                "precision": "int4",
                "head_precision": "int4",
                "block_size": 64,
                "quantizer": "search",
                "scale_type": "float32",
            },
            0.5 + 4 / 64,
        ),
    ],
)
def test_bytes_follow_precision_and_block(options: dict[str, Any], bytes_per_weight: float) -> None:
    found = previewed("llama-3-8b", **options)
    norms = (2 * 32 + 1) * 4096
    tables = 2 * 8192 * 64 * 4
    expected = (found["parameters"] - norms) * bytes_per_weight + norms * 4 + tables
    assert found["data_bytes"] == pytest.approx(expected, abs=64 * 1000)  # each tensor starts on 64 bytes


def test_the_largest_model_takes_a_moment_and_no_weights() -> None:
    assert not list((CONFIGS / "llama-3-70b").glob("*.safetensors"))
    started = time.perf_counter()
    previewed("llama-3-70b")
    assert time.perf_counter() - started < 5


def test_a_shorter_context_shrinks_the_rotary_tables_only() -> None:
    full, short = previewed("llama-3.1-8b"), previewed("llama-3.1-8b", max_context=4096)
    assert short["context_length"] == 4096
    assert full["data_bytes"] - short["data_bytes"] == 2 * (131072 - 4096) * 64 * 4


@pytest.mark.parametrize("max_context", [-1, 0, 1, 8193])
def test_a_context_that_the_model_does_not_have_is_refused(max_context: int) -> None:
    with pytest.raises(UsageError, match=rf"--max-context is {max_context}; this model takes 2 to 8192"):
        previewed("llama-3-8b", max_context=max_context)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="expected a Hugging Face model folder or a GGUF file"):
        preview(ExportOptions(source=str(tmp_path), output=Path("nowhere")))


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    previewed("llama-3-8b")
    assert not list(tmp_path.iterdir())
