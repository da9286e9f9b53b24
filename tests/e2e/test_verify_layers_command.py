"""``llorch verify --layers``, ``--write-reference`` and ``--reference``: documents, tables, exit codes,
refusals.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest

from llorch_serve.artifact.folder import load_artifact
from support.builders.checkpoints import write_hf_folder
from support.builders.reference_files import own_reference
from support.builders.tiny_exports import random_ids
from support.harness.processes import environment, llorch, llorch_here


@pytest.fixture(scope="module")
def exact(tiny_source, export_here):
    return export_here(tiny_source, tiny_source.parent / "layers-fp32", "--precision", "fp32")


@pytest.fixture(scope="module")
def kept(exact, tmp_path_factory):
    """A reference file, and 100 positions in it."""
    path = tmp_path_factory.mktemp("kept") / "tiny.reference"
    own_reference(path, load_artifact(exact), random_ids(100))
    return path


@pytest.mark.reference
def test_layers_as_one_document(exact, tiny_source):
    outcome = llorch("verify", exact, "--against", tiny_source, "--layers", "--json")
    document = outcome.document()
    assert document["passed"] is True
    assert document["first_departing"] is None
    assert document["recipe"]["precision"] == "fp32"
    names = [stage["name"] for stage in document["stages"]]
    assert (names[0], names[-3:]) == ("embedding", ["logits", "softmax", "greedy"])
    assert names.index("present.0.key") < names.index("model.layers.0.self_attn.heads/scores")
    assert {"kind", "layer", "source", "distance", "limit", "cosine", "max_abs", "passed"} <= set(
        document["stages"][0]
    )
    assert outcome.stderr == ""


@pytest.mark.reference
def test_layers_as_a_table(exact, tiny_source):
    outcome = llorch_here("verify", exact, "--against", tiny_source, "--layers")
    assert outcome.code == 0
    lines = outcome.stdout.splitlines()
    assert lines[0].split()[:3] == ["stage", "compared", "beyond"]
    assert [line[:17].rstrip() for line in lines[1:4]] == ["embedding", "RMSNorm", "QKV"]
    assert "32 greedy tokens" in outcome.stdout
    assert "recomputed in numpy" in outcome.stdout


@pytest.mark.reference
def test_layers_name_the_first_that_departs(exact, tmp_path):
    def edit(weights):
        weights["model.layers.1.mlp.down_proj.weight"] *= np.float32(1.01)

    other = write_hf_folder(tmp_path / "other", edit=edit)
    outcome = llorch_here("verify", exact, "--against", other, "--layers")
    assert outcome.code == 1
    note, error = outcome.stderr.splitlines()
    assert "other files" in note
    assert error.startswith("error: first departing stage: projection, model.layers.1.mlp.down_proj: ")
    failed = llorch_here("verify", exact, "--against", other, "--layers", "--json")
    assert failed.code == 1
    document = msgspec.json.decode(failed.stdout)
    assert document["first_departing"]["name"] == "model.layers.1.mlp.down_proj"


@pytest.mark.reference
def test_a_written_reference_serves_without_its_source(exact, tiny, tiny_source, tmp_path):
    path = tmp_path / "tiny.reference"
    whole = llorch_here(
        "verify", tiny, "--against", tiny_source, "--write-reference", path, "--json"
    ).document()
    found = llorch_here("verify", tiny, "--reference", path, "--json").document()
    assert found["oracle"] == whole["oracle"]
    assert found["tokens"] == 128  # the model's whole context, less than 256
    assert found["same_source"] is True
    assert found["passed"] is True
    assert found["kl"] == pytest.approx(whole["kl"], rel=0.5)
    assert llorch_here("verify", exact, "--reference", path, "--json").document()["kl"] < 2e-6


def test_a_reference_is_compared_without_torch_transformers_and_onnx(exact, kept):
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'onnx', 'onnx_ir', "
        "'gguf'))); "
        "from llorch_serve.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "verify", exact, "--reference", kept, "--json"]
    result = subprocess.run(command, capture_output=True, check=False, text=True, env=environment())
    assert (result.returncode, result.stderr) == (0, "")
    document = msgspec.json.decode(result.stdout)
    assert document["kl"] < 2e-6
    assert document["tokens"] == 100


def test_beyond_the_limit_exits_with_1(exact, tmp_path):
    own_reference(tmp_path / "noisy", load_artifact(exact), random_ids(50), noise=0.5)
    outcome = llorch_here("verify", exact, "--reference", tmp_path / "noisy")
    assert outcome.code == 1
    assert outcome.stdout.startswith("KL ")
    assert outcome.stderr.startswith("error: the divergence ")


def test_bench_puts_fidelity_beside_speed(tiny, kept):
    flags = (
        "--prompt-tokens",
        "8",
        "--max-tokens",
        "4",
        "--repeat",
        "1",
        "--streams",
        "1",
        "--reference",
        kept,
    )
    (entry,) = llorch_here("bench", tiny, *flags, "--json").document()["entries"]
    assert entry["rows"][1]["figures"]["decode_tokens_per_s"]["median"] > 0
    assert 1e-6 < entry["fidelity"]["kl"] < 0.01
    assert entry["fidelity"]["tokens"] == 100
    outcome = llorch_here("bench", tiny, *flags)
    assert "fidelity KL " in outcome.stdout.splitlines()[1]


def test_bench_without_a_reference_has_none(tiny):
    flags = ("--prompt-tokens", "8", "--max-tokens", "4", "--repeat", "1", "--streams", "1", "--json")
    (entry,) = llorch_here("bench", tiny, *flags).document()["entries"]
    assert entry["fidelity"] is None


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_file_that_is_no_reference_is_refused_at_once(tiny, tmp_path, command):
    (tmp_path / "ref").write_bytes(b"something else")
    for path, said in ((tmp_path / "ref", "is not a reference"), (tmp_path / "gone", "cannot be read")):
        outcome = llorch_here(command, tiny, "--reference", path)
        assert outcome.code == 3
        assert said in outcome.error()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((), "--against"),
        (("--against", "a", "--reference", "b"), "both"),
        (("--reference", "b", "--layers"), "--layers"),
        (("--reference", "b", "--lora", "c"), "--lora"),
        (("--reference", "b", "--write-reference", "c"), "--write-reference"),
        (("--against", "a", "--llama-cpp"), "--llama-cpp"),
        (("--against", "a", "--layers", "--write-reference", "c"), "--write-reference"),
    ],
)
def test_flags_that_do_not_go_together_are_a_usage_error(tiny, flags, named):
    outcome = llorch_here("verify", tiny, *flags)
    assert outcome.code == 2
    assert named in outcome.error()


@pytest.mark.reference
def test_llama_cpp_needs_a_gguf_file_and_its_package(
    exact, tiny_source, tiny_gguf, tmp_path, export_here, monkeypatch
):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    outcome = llorch_here("verify", exact, "--against", tiny_source, "--layers", "--llama-cpp")
    assert outcome.code == 2
    assert "GGUF" in outcome.error()
    artifact = export_here(tiny_gguf, tmp_path / "out", "--precision", "fp32")
    outcome = llorch_here("verify", artifact, "--against", tiny_gguf, "--layers", "--llama-cpp")
    assert outcome.code == 4
    assert "pip install llama-cpp-python" in outcome.error()


def test_a_worker_elsewhere_has_no_reference(kept):
    outcome = llorch_here("bench", "--connect", "127.0.0.1:1", "--reference", kept)
    assert outcome.code == 2
    assert "--reference" in outcome.error()
