"""What providers compute in, and what an artifact in half precision takes of memory."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest

from llorch_serve.artifact.manifest import KvLayout
from llorch_serve.cache.kv_cache import KvCache, KvCapacity
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ProviderError
from llorch_serve.providers import ARITHMETIC, CPU, require_arithmetic
from llorch_serve.runtime import opening as session
from llorch_serve.runtime.memory_plan import loaded_bytes
from llorch_serve.runtime.opening import open_session
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_artifact import tiny_manifest
from support.builders.tiny_exports import export_tiny


def test_a_type_without_arithmetic_is_refused_with_what_would_do() -> None:
    with pytest.raises(ProviderError) as caught:
        require_arithmetic(CPU, ("bfloat16", "float32"))
    message = str(caught.value)
    assert message.startswith(
        "the artifact computes in bfloat16 and CPUExecutionProvider has no bfloat16 arithmetic"
    )
    assert "--precision fp32 or --precision fp16" in message
    assert message.endswith("(CUDAExecutionProvider)")


def test_every_type_in_the_table_is_accepted() -> None:
    for provider, types in ARITHMETIC.items():
        require_arithmetic(provider, types)


def test_an_artifact_is_refused_before_the_runtime_is_asked(tmp_path: Path) -> None:
    artifact = export_tiny(write_hf_folder(tmp_path / "source"), tmp_path / "out", precision="bf16")
    with (
        mock.patch.object(session, "import_runtime", side_effect=AssertionError),
        pytest.raises(ProviderError, match="bfloat16"),
    ):
        open_session(artifact, SessionConfig(threads=1, slots=1), lambda report: None)


@pytest.mark.parametrize(("kind", "size"), [("float32", 4), ("float16", 2)])
def test_the_cache_has_the_layouts_type(kind, size: int) -> None:
    layout = KvLayout(layers=3, kv_heads=2, head_dim=16, dtype=kind)
    assert layout.bytes_per_token == 2 * 3 * 2 * 16 * size
    cache = KvCache(layout, KvCapacity(slots=4, context=8, bytes_per_token=layout.bytes_per_token, budget=32))
    rows = cache.rows(2, "value", 1, 2)
    assert (rows.shape, rows.dtype) == ((2, 2, 8, 16), np.dtype(kind))
    assert not rows.any()


def test_a_bfloat16_token_takes_two_bytes_a_value() -> None:
    assert KvLayout(layers=3, kv_heads=2, head_dim=16, dtype="bfloat16").bytes_per_token == 2 * 3 * 2 * 16 * 2


def test_weights_that_the_cpu_widens_take_twice_their_size_in_memory() -> None:
    manifest = tiny_manifest()
    stored = sum(entry.bytes for entry in manifest.files)
    assert loaded_bytes(manifest, CPU) == stored
    half = msgspec.structs.replace(manifest.recipe, precision="fp16", compute_type="float16")
    blocks = msgspec.structs.replace(manifest.recipe, precision="int8", compute_type="float16")
    assert loaded_bytes(msgspec.structs.replace(manifest, recipe=half), CPU) == 2 * stored
    assert loaded_bytes(msgspec.structs.replace(manifest, recipe=half), "CUDAExecutionProvider") == stored
    assert loaded_bytes(msgspec.structs.replace(manifest, recipe=blocks), CPU) == stored
