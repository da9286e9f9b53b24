"""``llorch verify`` on tiny models: passes for the own source, fails for another, and says so in both
languages.
"""

from __future__ import annotations

import pytest

from support.builders.adapters import write_adapter
from support.builders.checkpoints import tiny_llama_config, write_hf_folder
from support.harness.processes import llorch, llorch_here

pytestmark = pytest.mark.reference
KEYS = {"kl", "top1", "max_abs", "tokens", "oracle"}


@pytest.fixture(scope="module")
def exact(tiny_source, export_here):
    return export_here(tiny_source, tiny_source.parent / "fp32", "--precision", "fp32")


def test_json_is_one_document_on_stdout(exact, tiny_source):
    outcome = llorch("verify", exact, "--against", tiny_source, "--json")
    document = outcome.document()
    assert document.keys() >= KEYS
    assert document["kl"] < 1e-6
    assert document["top1"] > 0.99
    assert document["same_source"] is True
    assert "float32" in document["oracle"]
    assert outcome.stderr == ""


def test_gguf_is_its_own_reference(tiny_gguf, tmp_path, export_here):
    artifact = export_here(tiny_gguf, tmp_path / "a", "--precision", "fp32")
    document = llorch_here("verify", artifact, "--against", tiny_gguf, "--json").document()
    assert document["kl"] < 1e-6


def test_adapters_are_part_of_both_sides(tiny_source, tmp_path, export_here):
    write_adapter(tmp_path / "lora", tiny_llama_config())
    write_adapter(tmp_path / "a=1", tiny_llama_config(), lora_alpha=2)
    merge = ("--lora", tmp_path / "lora", "--lora", f"{tmp_path / 'a=1'}=-0.5")
    artifact = export_here(tiny_source, tmp_path / "a", "--precision", "fp32", *merge)
    document = llorch_here("verify", artifact, "--against", tiny_source, *merge, "--json").document()
    assert document["kl"] < 1e-6
    assert document["same_source"] is True
    assert llorch_here("verify", artifact, "--against", tiny_source).code == 1


def test_another_model_fails(exact, tmp_path):
    other = write_hf_folder(tmp_path / "other", seed=1)
    outcome = llorch_here("verify", exact, "--against", other)
    assert outcome.code == 1
    note, error = outcome.stderr.splitlines()
    assert "other files" in note
    assert error.startswith("error: the divergence ")
    assert "limit 1e-06" in outcome.stdout


def test_missing_sides_are_named(exact, tiny_source, tmp_path):
    for arguments in ((tmp_path / "gone", "--against", tiny_source), (exact, "--against", tmp_path / "gone")):
        outcome = llorch_here("verify", *arguments)
        assert outcome.code == 3
        assert str(tmp_path / "gone") in outcome.error()


def test_graphs_of_fixed_shapes_are_verified_on_both_and_against_a_file(tiny_source, tmp_path, export_here):
    flags = ("--target", "coreml", "--precision", "fp32", "--max-context", "64")
    artifact = export_here(tiny_source, tmp_path / "a", *flags)
    kept = tmp_path / "reference"
    verified = llorch_here(
        "verify", artifact, "--against", tiny_source, "--write-reference", kept, "--json"
    ).document()
    assert 0 <= verified["prefill_kl"] < 1e-6
    assert 0 <= verified["decode_kl"] < 1e-6
    assert llorch_here("verify", artifact, "--reference", kept, "--json").document()["passed"] is True
    measured = llorch_here(
        *(
            "bench",
            artifact,
            "--tests",
            "decode",
            "--prompt-tokens",
            "8",
            "--max-tokens",
            "4",
            "--streams",
            "2",
        ),
        *("--repeat", "1", "--reference", kept, "--json"),
    ).document()
    assert measured["entries"][0]["fidelity"]["passed"] is True
