"""``llorch export --embed``, ``embed``, ``inspect`` and ``verify``, and the commands that need logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from support.builders.checkpoints import write_hf_folder
from support.harness.processes import llorch_here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("embed") / "model")


@pytest.fixture(scope="module")
def artifact(model: Path) -> Path:
    """Return an export by the default recipe."""
    folder = model.parent / "artifact"
    llorch_here("export", str(model), "--embed", "mean", "--output", str(folder), "--json").document()
    return folder


def refused(code: int, *arguments: object) -> str:
    """Run a command that must end with ``code``; return what it says."""
    outcome = llorch_here(*arguments)
    assert outcome.code == code, outcome
    assert "Traceback" not in outcome.stderr
    return outcome.stderr


def test_texts_of_flags_and_of_a_file(artifact: Path, tmp_path: Path) -> None:
    flags = llorch_here("embed", str(artifact), "--text", "The quick", "--text", "x\u2028y\fz").stdout.split(
        "\n"
    )
    file = tmp_path / "texts"
    file.write_bytes("The quick\r\nx\u2028y\fz\n".encode())
    assert llorch_here("embed", str(artifact), "--file", str(file)).stdout.split("\n") == flags
    assert flags.pop() == ""
    found = [json.loads(line) for line in flags]
    assert [each["index"] for each in found] == [0, 1]
    assert [len(each["embedding"]) for each in found] == [64, 64]
    np.testing.assert_allclose(np.linalg.norm(found[0]["embedding"]), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ((), "neither of --text and --file"),
        (("--text", "a", "--file", "b"), "both of --text and --file"),
        (("--file", "/nowhere"), "/nowhere"),
        (("--text", "word " * 300), "truncate_prompt_tokens"),
        (("--text", "a", "--dimensions", "65"), "expected 1 to 64"),
    ],
)
def test_what_cannot_be_embedded_is_said(artifact: Path, flags: tuple[str, ...], found: str) -> None:
    assert found in refused(2, "embed", artifact, *flags)


def test_commands_that_need_logits_refuse_the_artifact_by_what_it_is(artifact: Path) -> None:
    for command in (
        ("generate", str(artifact), "--prompt", "a"),
        ("score", str(artifact), "--continuation", "a"),
    ):
        assert "embeds texts" in refused(3, *command)


def test_flags_without_effect_are_refused(artifact: Path) -> None:
    for flags in (("--kv-cache-memory", "1MiB"), ("--lookup", "4"), ("--rank-format", "qwen3")):
        said = refused(2, "serve", artifact, "--preload-only", *flags)
        assert flags[0] in said
        assert "has no effect" in said
    assert "embedding texts of up to" in llorch_here("serve", str(artifact), "--preload-only").stderr


def test_inspect_tells_how_texts_become_vectors(artifact: Path) -> None:
    shown = llorch_here("inspect", str(artifact)).stdout
    assert "gives a vector for each text: the mean of all states, of length 1" in shown
    assert "KV cache" not in shown
    document = llorch_here("inspect", str(artifact), "--json").document()
    assert document["embedding"] == {"pooling": "mean", "normalised": True}
    assert (document["memory"], document["recipe"]["precision"]) == ([], "fp32")


@pytest.mark.reference
def test_verify_compares_vectors(model: Path, artifact: Path, tmp_path: Path) -> None:
    document = llorch_here("verify", str(artifact), "--against", str(model), "--json").document()
    assert document["passed"]
    assert document["lowest_cosine"] > document["limit"] == 0.99999
    other = write_hf_folder(tmp_path / "other", seed=7)
    assert "below the limit" in refused(1, "verify", artifact, "--against", other)
    kept = ("--write-reference", tmp_path / "kept")
    assert "embeds texts" in refused(2, "verify", artifact, "--against", model, *kept)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--embed", "last", "--target", "cuda"), "--embed last with --target cuda"),
        (("--embed", "last", "--kv-dtype", "float32"), "has no effect with --embed last"),
        (("--embed", "last", "--prefill-recipe", "cpu-prompts"), "--prefill-recipe has no effect"),
        (("--embed", "last", "--via", "optimum"), "--embed last with --via optimum"),
    ],
)
def test_options_of_an_export_that_do_not_go_with_vectors(
    model: Path, tmp_path: Path, flags: tuple[str, ...], found: str
) -> None:
    assert found in refused(2, "export", model, "--output", tmp_path / "a", *flags)
    assert not (tmp_path / "a").exists()
