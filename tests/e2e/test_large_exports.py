"""Models of real size, as sparse files of zeros: time and memory of an export do not follow the size of its
tensors.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llorch_export.checkpoint.names import expected_tensors
from llorch_export.config.hf import config_from_hf
from support.builders.checkpoints import tiny_config, tiny_tokenizer_json
from support.builders.raw_safetensors import save_zeros
from tolerances import EXPORT_1B_SECONDS, EXPORT_LARGE_BYTES, WEIGHTS_MEASURED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, needs sparse files")

# An embedding of 2.2 GB in bfloat16: beyond the 2 GB that one protobuf message may hold.
LARGE_EMBEDDING = {
    "vocab_size": 262144, "hidden_size": 4224, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip

MEASURE = """
import json, sys, time
from pathlib import Path
from llorch_export.graph.stage_choice import parse_stages
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
def peak():
    # Not ru_maxrss: that counts what the parent held before this program was started in its place.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
before = peak()
stages = parse_stages(sys.argv[4] or None)
options = ExportOptions(
    source=sys.argv[1], output=Path(sys.argv[2]), precision="int8", kv_dtype=sys.argv[3], stages=stages
)
export(options, lambda *a: None)
print(json.dumps({"growth": peak() - before, "cpu_seconds": time.process_time()}))
"""


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A folder whose gigabytes go away with the test."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def export_zeros(
    scratch: Path, shape: dict[str, object], *, needed: int, kv_dtype: str = "float32", stages: str = ""
) -> tuple[Path, dict[str, float]]:
    """Export a model of ``shape`` to int8; return the artifact's folder and what it took."""
    free = shutil.disk_usage(scratch).free
    if free < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of disk at {scratch}, where {free / 1e9:.0f} GB are free")
    model = scratch / "model"
    model.mkdir()
    config = tiny_config(**shape)
    save_zeros(model / "model.safetensors", expected_tensors(config_from_hf(config)), "BF16")
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text(tiny_tokenizer_json())
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(model), str(scratch / "out"), kv_dtype, stages],
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    figures: dict[str, float] = json.loads(result.stdout)
    return scratch / "out", figures


@pytest.mark.slow
def test_an_embedding_beyond_the_protobuf_limit(scratch: Path) -> None:
    artifact, figures = export_zeros(scratch, LARGE_EMBEDDING, needed=2 * 10**9)
    assert (scratch / "model" / "model.safetensors").stat().st_size > 2.2e9
    assert (artifact / "model.onnx").stat().st_size < 64 * 1024
    assert 1.1e9 < (artifact / "model.onnx.data").stat().st_size < 1.3e9
    assert figures["growth"] < EXPORT_LARGE_BYTES


def test_a_model_of_the_shape_of_llama_3_2_1b(scratch: Path) -> None:
    _, figures = export_zeros(scratch, LLAMA_1B, needed=2 * 10**9)
    assert figures["growth"] < EXPORT_LARGE_BYTES
    # Of the processor, because other work on the machine would stretch the clock's.
    assert figures["cpu_seconds"] < EXPORT_1B_SECONDS


@pytest.mark.slow
def test_measuring_the_cache_of_llama_3_2_1b_takes_its_weights(scratch: Path) -> None:
    _, figures = export_zeros(scratch, LLAMA_1B, needed=2 * 10**9, kv_dtype="int8")
    assert figures["growth"] < EXPORT_LARGE_BYTES + WEIGHTS_MEASURED * 1.4e9
    assert figures["cpu_seconds"] < EXPORT_1B_SECONDS


@pytest.mark.slow
def test_a_model_of_the_shape_of_llama_3_8b(scratch: Path) -> None:
    artifact, figures = export_zeros(scratch, LLAMA_8B, needed=12 * 10**9)
    assert (artifact / "model.onnx.data").stat().st_size > 8e9
    assert figures["growth"] < EXPORT_LARGE_BYTES


@pytest.mark.slow
def test_the_same_in_stages(scratch: Path) -> None:
    artifact, figures = export_zeros(scratch, LLAMA_8B, needed=12 * 10**9, stages="4")
    sizes = [(artifact / f"stage{number}.onnx.data").stat().st_size for number in range(4)]
    assert sum(sizes) > 8e9
    assert max(sizes) < 0.28 * sum(sizes)
    assert figures["growth"] < EXPORT_LARGE_BYTES
