"""Exporting holds a few rows at a time, whatever the size of the checkpoint and of its tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import tiny_config, tiny_tokenizer_json
from llorch_export.checkpoint.names import expected_tensors
from llorch_export.config import config_from_hf
from raw_safetensors import save_zeros
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


def sparse_model(folder: Path, *, tied: bool) -> Path:
    """Write a model of zeros that takes next to nothing on the disk."""
    folder.mkdir()
    config = tiny_config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        head_dim=16,
        num_hidden_layers=1,
        tie_word_embeddings=tied,
    )
    save_zeros(folder / "model.safetensors", expected_tensors(config_from_hf(config)), "F32")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("precision", "tied"), [("int8", True), ("int4", False), ("fp32", False)])
def test_peak_memory_does_not_follow_the_size_of_a_tensor(tmp_path: Path, precision: str, tied: bool) -> None:
    source = sparse_model(tmp_path / "model", tied=tied)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "out"), precision],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    growth = int(result.stdout)
    assert growth > 2**22  # else the measurement saw nothing
    assert growth < EXPORT_MEMORY_BYTES < TABLE_BYTES / 2
    graph, data = (tmp_path / "out" / name for name in ("model.onnx", "model.onnx.data"))
    assert graph.stat().st_size < 64 * 1024
    if precision != "fp32":
        assert data.stat().st_size < 0.75 * TABLE_BYTES  # two tables of 8 bits, at most
