"""Exporting holds a few rows at a time, whatever the size of the checkpoint and of its tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llorch_export.checkpoint.names import expected_tensors
from llorch_export.config.hf import config_from_hf
from support.builders.checkpoints import tiny_config, tiny_tokenizer_json
from support.builders.raw_safetensors import save_zeros
from tolerances import EXPORT_MEMORY_BYTES

VOCABULARY, HIDDEN = 32768, 1536
TABLE_BYTES = VOCABULARY * HIDDEN * 4  # 192 MiB in fp32

MEASURE = """
import sys
from pathlib import Path
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
def peak():
    # Not ru_maxrss: that counts what the parent held before this program was started in its place.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
before = peak()
precision = sys.argv[3]
quantizer = "affine" if precision == "int4" else None  # a small model's default runs it, which takes its weights
options = ExportOptions(sys.argv[1], Path(sys.argv[2]), precision, quantizer=quantizer, kv_dtype="float32")
export(options, lambda *a: None)
print(peak() - before)
"""


def sparse_model(folder: Path, **sizes: object) -> Path:
    """Write a model of zeros that takes next to nothing on the disk."""
    folder.mkdir()
    config = tiny_config(head_dim=16, num_hidden_layers=1, **sizes)
    save_zeros(folder / "model.safetensors", expected_tensors(config_from_hf(config)), "F32")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    return folder


def growth_of_export(source: Path, output: Path, precision: str) -> int:
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source), str(output), precision],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return int(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("precision", "tied"), [("int8", True), ("int4", False), ("fp32", False)])
def test_peak_memory_does_not_follow_the_size_of_a_tensor(tmp_path: Path, precision: str, tied: bool) -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "tie_word_embeddings": tied}
    growth = growth_of_export(sparse_model(tmp_path / "model", **sizes), tmp_path / "out", precision)
    assert growth > 2**22  # else the measurement saw nothing
    assert growth < EXPORT_MEMORY_BYTES < TABLE_BYTES / 2
    graph, data = (tmp_path / "out" / name for name in ("model.onnx", "model.onnx.data"))
    assert graph.stat().st_size < 64 * 1024
    if precision != "fp32":
        assert data.stat().st_size < 0.75 * TABLE_BYTES  # two tables of 8 bits, at most


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_does_not_follow_the_context(tmp_path: Path) -> None:
    """Its tables of rotary angles are made in rows, too."""
    positions = 2**21
    source = sparse_model(tmp_path / "model", max_position_embeddings=positions)
    growth = growth_of_export(source, tmp_path / "out", "fp32")
    tables = 2 * positions * 8 * 4
    assert (tmp_path / "out" / "model.onnx.data").stat().st_size > tables
    assert growth < EXPORT_MEMORY_BYTES < tables / 1.5
