"""``llorch tune`` on a tiny model: what it prints and leaves, what it takes up again, what it refuses. Which
recipe wins is not looked at: on a model this small that is chance.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import psutil
import pytest

from llorch_serve.artifact.folder import load_artifact
from support.builders.checkpoints import write_hf_folder
from support.builders.reference_files import own_reference
from support.builders.tiny_exports import random_ids
from support.harness.processes import PATIENCE_S, environment, llorch_here

QUICK = ("--streams", "1,2", "--prompt-tokens", "16", "--time", "2s")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("tune-cache")


@pytest.fixture(scope="module")
def tuned(tiny_source, cache, tmp_path_factory):
    """A search with an output, and what it printed."""
    output = tmp_path_factory.mktemp("tuned") / "new" / "tuned"
    flags = ("--output", output, "--png", output.parent.with_suffix(".png"), "--json")
    return output, llorch_here("tune", tiny_source, *QUICK, *flags, LLORCH_CACHE=cache)


def test_a_document_an_artifact_a_recipe_and_a_picture(tuned, cache):
    output, outcome = tuned
    document = outcome.document()
    assert document["complete"] is True
    assert (document["default"], document["positions"]) == ("cpu-calibrated", 128)
    default, *_ = [one for one in document["tried"] if one["label"] == "cpu-calibrated"]
    assert (default["ratio"], default["margin"], default["kl"] < 0.01) == (1.0, None, True)
    assert [*default["speeds"]] == [
        "prefill, 1 stream", "decode, 1 stream", "prefill, 2 streams", "decode, 2 streams",
    ]  # fmt: skip
    assert default["peak_mib"] > 10
    chosen = [one for one in document["tried"] if one["label"] == document["chosen"]]
    assert len(chosen) == 1
    assert chosen[0]["kl"] <= 0.01
    assert not list(cache.glob("tune/*/artifacts"))
    assert output.parent.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert document["artifact"] == str(output)
    assert document["recipe"] == f"{output}.toml"


def test_the_recipe_repeats_the_export_and_has_its_evidence(tuned, tiny_source, tmp_path):
    output, outcome = tuned
    document = outcome.document()
    again = llorch_here("export", tiny_source, "--recipe", f"{output}.toml", "--output", tmp_path / "again")
    assert again.code == 0, again
    first, second = load_artifact(output).manifest, load_artifact(tmp_path / "again").manifest
    assert first.fingerprint == second.fingerprint
    assert first.files == second.files
    evidence = tomllib.loads(output.with_name("tuned.toml").read_text())["evidence"]
    assert evidence["command"].startswith("llorch tune ")
    assert evidence["export"] == document["export"]
    assert evidence["chosen"]["recipe"] == document["chosen"]
    assert document["host"]["cpu"] in evidence["machine"]
    assert any(name.startswith("onnxruntime ") for name in evidence["software"])
    oracle = "transformers" if importlib.util.find_spec("torch") else "llorch's own graph in fp32"
    assert oracle in evidence["reference"]


def test_another_search_takes_up_what_was_measured(tuned, tiny_source, cache):
    outcome = llorch_here("tune", tiny_source, *QUICK, "--max-kl", "1e-9", LLORCH_CACHE=cache)
    assert "taking up" in outcome.stderr
    # Nothing was exported or run anew, and no recipe of a tiny model is that near.
    assert outcome.code == 6
    assert "recipes keeps KL 1e-09; the nearest has KL" in outcome.stderr.splitlines()[-1]
    assert outcome.stdout.startswith("| recipe | KL, nats | peak MiB | prefill, 1 stream, tokens/s |")


def test_without_transformers_the_reference_is_the_own_graph_and_says_so(tiny_source, tmp_path, monkeypatch):
    from llorch_export.tune import reference

    monkeypatch.setattr(reference, "has_transformers", lambda: False)
    outcome = llorch_here("tune", tiny_source, *QUICK, "--json", LLORCH_CACHE=tmp_path)
    document = outcome.document()
    assert document["oracle"].startswith("llorch's own graph in fp32, onnxruntime ")
    assert "torch and transformers are not installed (pip install 'llorch[reference]')" in outcome.stderr
    kl = {one["label"]: one["kl"] for one in document["tried"]}
    assert 0 < kl["cpu-calibrated"] < 0.01


def test_a_reference_may_be_given(tiny, tiny_source, cache, tmp_path, monkeypatch):
    own_reference(tmp_path / "reference", load_artifact(tiny), random_ids(20))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**10, total=2**34))
    short = llorch_here("tune", tiny_source, *QUICK, LLORCH_CACHE=tmp_path)
    assert short.code == 6
    assert "GiB of memory are free; make one where there is more, with llorch verify" in short.error()
    monkeypatch.undo()
    flags = (*QUICK, "--reference", tmp_path / "reference", "--json")
    document = llorch_here("tune", tiny_source, *flags, LLORCH_CACHE=cache).document()
    assert (document["positions"], document["tried"][0]["kl"] is None) == (20, False)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_ctrl_c_leaves_what_is_known_and_nothing_at_the_output(tuned, tiny_source, cache, tmp_path):
    command = [sys.executable, "-m", "llorch_serve", "tune", str(tiny_source), *QUICK[:-1], "10m", "--json"]
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(LLORCH_CACHE=cache),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("running by turns"):  # what was raced before is not raced again
            break
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "the same command goes on from here" in stderr
    document = json.loads(stdout)
    assert document["complete"] is False
    assert len(document["tried"]) > 1
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.toml").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--time", "soon"), "--time is 'soon'; expected a time like 90s, 10m or 2h"),
        (("--time", "0m"), "--time is '0m'"),
        (("--memory", "lots"), "--memory is 'lots'; expected a number of bytes"),
        (("--streams", "1,x"), "--streams is '1,x'; expected numbers"),
        (("--max-kl", "0"), "--max-kl is 0.0; expected nats above 0"),
        (("--max-kl", "nan"), "--max-kl is nan; expected nats above 0"),
        (("--force",), "--force has no effect without --output; leave it out"),
        (("--png", "/nowhere/a.png"), "--png is /nowhere/a.png; expected a file in a folder that exists"),
        (("--prompt-tokens", "120"), "needs a context of 160 tokens; this model has 128. Choose fewer"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_before_anything_runs(tiny_source, tmp_path, flags, says):
    outcome = llorch_here("tune", tiny_source, *flags, LLORCH_CACHE=tmp_path)
    assert outcome.code == 2
    assert says in outcome.error()


def test_places_that_cannot_be_written_are_refused_before_anything_runs(tiny, tiny_source, tmp_path):
    taken = llorch_here("tune", tiny_source, "--output", tiny, LLORCH_CACHE=tmp_path)
    assert (taken.code, "already holds an artifact; replace it with --force" in taken.error()) == (2, True)
    (tmp_path / "new.toml").write_text("")
    there = llorch_here("tune", tiny_source, "--output", tmp_path / "new", LLORCH_CACHE=tmp_path)
    assert (there.code, "new.toml is there already" in there.error()) == (2, True)
    nowhere = llorch_here("tune", tiny_source)  # whose cache cannot be written to
    assert (nowhere.code, "name a folder with room in LLORCH_CACHE" in nowhere.error()) == (6, True)


def test_a_checkpoint_that_embeds_texts_is_refused(tmp_path):
    source = write_hf_folder(tmp_path / "source")
    (source / "modules.json").write_text(
        json.dumps(
            [
                {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            ]
        )
    )
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    outcome = llorch_here("tune", source, LLORCH_CACHE=tmp_path)
    assert outcome.code == 2
    assert "embeds texts, and recipes are compared by the next token's probabilities" in outcome.error()
