"""``llorch inspect``: figures that add up, with onnx and without it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import msgspec
import pytest

from support.harness.processes import environment, llorch_here


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_figures_add_up(tiny_source, tmp_path, export_here, precision):
    folder = export_here(tiny_source, tmp_path / "out", "--precision", precision)
    document = llorch_here("inspect", folder, "--json").document()
    sizes = {entry["path"]: entry["bytes"] for entry in document["files"]}
    assert sizes == {p.name: p.stat().st_size for p in folder.iterdir() if p.name != "llorch.json"}
    assert document["total_bytes"] == sum(sizes.values())
    assert document["recipe"]["precision"] == precision
    # K and V, layers, heads, head_dim; a byte each beside quantised weights, else float32.
    assert document["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * (4 if precision == "fp32" else 1)
    for row in document["memory"]:
        assert row["kv_bytes"] == row["slots"] * row["context"] * document["kv_bytes_per_token"]
        assert row["total_bytes"] == row["kv_bytes"] + document["total_bytes"]
    assert document["stop_tokens"] == [{"id": 1, "text": "<|eos|>"}]
    weights = document["graph"]["weight_bytes"]
    blocks = {"fp32": 1, "int8": 4, "int4": 8}[precision]
    # Per layer: q and o 64 x 64, k and v 32 x 64, three of 64 x 96; all are whole blocks of 32.
    assert weights["linear"] == 2 * 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96) // blocks
    assert weights["embedding and head"] == 2 * 4 * 512 * 64 // (1 if precision == "fp32" else 4)
    assert weights["rotary tables"] == 2 * 4 * 128 * 8
    assert weights["norms"] == 4 * 5 * 64
    assert ("scales" in weights) is (precision != "fp32")
    aligned = sizes["model.onnx.data"] - sum(n for kind, n in weights.items() if kind != "constants")
    assert 0 <= aligned < 64 * 40
    assert document["graph"]["ops"]["GroupQueryAttention"] == 2


def test_tied_tables_count_once(tmp_path, export_here):
    from support.builders.checkpoints import write_hf_folder

    source = write_hf_folder(tmp_path / "model", {"tie_word_embeddings": True})
    folder = export_here(source, tmp_path / "out", "--precision", "int8")
    weights = llorch_here("inspect", folder, "--json").document()["graph"]["weight_bytes"]
    assert weights["embedding and head"] == 512 * 64


def test_text_for_people(tiny):
    outcome = llorch_here("inspect", tiny)
    assert outcome.code == 0
    for said in (
        "int8",
        "MatMulNBits",
        "'<|eos|>'",
        "128 bytes a token",
        "embedding and head",
        "tokenizer.json",
    ):
        assert said in outcome.stdout


def test_without_onnx_the_rest_is_shown(tiny):
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('onnx', 'onnx_ir', 'onnxruntime', 'torch', 'gguf'))); "
        "from llorch_serve.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "inspect", tiny, "--json"]
    result = subprocess.run(command, capture_output=True, check=False, text=True, env=environment())
    assert result.returncode == 0, result.stderr
    assert "pip install 'llorch[export]'" in result.stderr
    document = msgspec.json.decode(result.stdout)
    assert document["graph"] is None
    assert document["kv_bytes_per_token"] == 128


def test_what_is_no_artifact_is_refused(tmp_path, tiny_source):
    for path in (tmp_path / "gone", tiny_source):
        outcome = llorch_here("inspect", path)
        assert outcome.code == 3
        assert str(path) in outcome.error()


def test_a_graph_that_is_no_graph_is_refused(tmp_path):
    from support.builders.tiny_artifact import write_tiny_artifact

    outcome = llorch_here("inspect", write_tiny_artifact(tmp_path / "a"))
    assert outcome.code == 3
    assert "is not an ONNX model" in outcome.error()


def test_graphs_beside_the_first_are_shown(tiny):
    document = llorch_here("inspect", tiny, "--json").document()
    assert document["kv_dtypes"] == ["int8", "float32"]
    assert document["kv_bytes_per_token"] == 2 * 2 * 2 * 16  # layers, keys and values, heads, their size
    assert document["prompts"]["recipe"]["activations"] == "static"
    lines = llorch_here("inspect", tiny).stdout.splitlines()
    assert any(line.startswith("prompts") and "prompts.onnx: precision int8" in line for line in lines)
    assert any(
        line.startswith("KV cache") and "int8 or float32, 128 bytes a token in int8" in line for line in lines
    )


def test_the_repository_and_its_commit_are_told(tiny, tmp_path):
    folder = tmp_path / "artifact"
    shutil.copytree(tiny, folder)
    document = json.loads((folder / "llorch.json").read_bytes())
    document["source"] |= {"repository": "org/name", "revision": "0123abcd" * 5, "adapter": "style"}
    (folder / "llorch.json").write_text(json.dumps(document))
    line = next(
        line for line in llorch_here("inspect", folder).stdout.splitlines() if line.startswith("source")
    )
    assert line.endswith(f", with adapter style, from org/name@{'0123abcd' * 5}")
