"""The CI recipe as a script, with a tiny checkpoint: what it keeps, what it checks, what it fails for; and
the workflow that calls it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.builders.checkpoints import write_hf_folder
from support.harness.processes import PATIENCE_S, environment

RECIPE = Path(__file__).parent.parent.parent / "examples" / "ci"
BENCH = "--tests mixed --prompt-tokens 20 --max-tokens 16 --streams 1 --repeat 1"
# Of a model this small speeds vary by any factor; that they are compared at all is what is looked at.
ANY_SPEED = "--fail-under 0.001"


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """A folder with a command ``llorch``, as a wheel would install it."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "llorch"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llorch_serve "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def run(shim):
    """Return a function that runs the script."""

    def script(*arguments, compare=ANY_SPEED, **variables):
        flags = {"BENCH_FLAGS": BENCH, "COMPARE_FLAGS": compare, **variables}
        variables = environment(PATH=f"{shim}{os.pathsep}{os.environ['PATH']}", **flags)
        return subprocess.run(
            [str(RECIPE / "model-ci.sh"), *map(str, arguments)],
            capture_output=True,
            check=False,
            text=True,
            env=variables,
            timeout=PATIENCE_S,
        )

    return script


@pytest.fixture(scope="module")
def kept(run, tiny_source, tmp_path_factory):
    """What ``keep`` keeps of the tiny model."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("kept") / "new"
    outcome = run("keep", tiny_source, folder)
    assert outcome.returncode == 0, outcome.stderr
    return folder


@pytest.mark.reference
def test_what_is_kept(kept):
    assert sorted(path.name for path in kept.iterdir()) == ["bench.json", "reference"]
    (entry,) = json.loads((kept / "bench.json").read_text())["entries"]
    assert entry["fidelity"]["passed"] is True


@pytest.mark.reference
def test_a_model_like_before_passes(run, kept, tiny_source, tmp_path):
    outcome = run("check", tiny_source, kept, tmp_path / "out")
    assert outcome.returncode == 0, outcome.stderr
    assert "passed: 0 of" in outcome.stdout
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {"model", "verify.json", "bench.json", "bench.html", "bench.md", "compare.txt"}
    assert (tmp_path / "out" / "compare.txt").read_text() in outcome.stdout
    assert [line for line in outcome.stderr.splitlines() if line.startswith("== ")] == [
        "== export",
        "== verify",
        "== bench",
        "== compare",
    ]


@pytest.mark.reference
def test_a_slower_model_fails_and_leaves_its_results(run, kept, tiny_source, tmp_path):
    before = tmp_path / "kept"
    shutil.copytree(kept, before)
    report = json.loads((kept / "bench.json").read_text())
    for figure in report["entries"][0]["rows"][0]["figures"].values():
        if figure["unit"] == "tokens/s":
            figure |= {name: figure[name] * 1e6 for name in ("median", "low", "high")}
    (before / "bench.json").write_text(json.dumps(report))
    outcome = run("check", tiny_source, before, tmp_path / "out")
    assert outcome.returncode == 1
    assert "failed: " in (tmp_path / "out" / "compare.txt").read_text()
    assert (tmp_path / "out" / "bench.html").exists()


@pytest.mark.reference
def test_a_model_with_other_answers_fails_before_it_is_measured(run, kept, tmp_path):
    other = write_hf_folder(tmp_path / "other", seed=1)
    outcome = run("check", other, kept, tmp_path / "out")
    assert outcome.returncode == 1
    assert "== bench" not in outcome.stderr
    assert json.loads((tmp_path / "out" / "verify.json").read_text())


@pytest.mark.reference
def test_export_flags_are_used(run, kept, tiny_source, tmp_path):
    outcome = run("check", tiny_source, kept, tmp_path / "out", EXPORT_FLAGS="--precision fp32")
    assert outcome.returncode == 0, outcome.stderr
    assert "fp32" in (tmp_path / "out" / "bench.md").read_text()


@pytest.mark.parametrize("arguments", [(), ("check",), ("keep", "a", "b", "c"), ("other", "a", "b")])
def test_other_words_are_answered_with_the_usage(run, arguments):
    outcome = run(*arguments)
    assert outcome.returncode == 2
    assert "model-ci.sh check SOURCE KEPT OUT" in outcome.stderr


def test_nothing_kept_is_a_failure(run, tiny_source, tmp_path):
    outcome = run("check", tiny_source, tmp_path / "absent", tmp_path / "out")
    assert outcome.returncode != 0
    assert "absent/reference" in outcome.stderr


@pytest.mark.reference
def test_the_workflow_runs_the_script(run, kept, tiny_source, tmp_path, shim):
    """Its own lines, in a checkout that has the script where the workflow looks for it."""
    workflow = yaml.safe_load((RECIPE / "model.yml").read_text())
    place = tmp_path / ".github" / "workflows"
    place.mkdir(parents=True)
    shutil.copy(RECIPE / "model-ci.sh", place)
    shutil.copytree(kept, tmp_path / "kept")
    job = workflow["jobs"]["check"]
    assert "fail-under" in workflow["env"]["COMPARE_FLAGS"]
    lines = [step["run"] for step in job["steps"] if "run" in step and "pip install" not in step["run"]]
    summary = tmp_path / "summary"
    variables = environment(
        PATH=f"{shim}{os.pathsep}{os.environ['PATH']}",
        GITHUB_STEP_SUMMARY=summary,
        **workflow["env"] | {"SOURCE": str(tiny_source), "BENCH_FLAGS": BENCH, "COMPARE_FLAGS": ANY_SPEED},
    )
    for line in lines:
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            check=True,
            cwd=tmp_path,
            env=variables,
            timeout=PATIENCE_S,
        )
    assert "mixed" in summary.read_text() or "prefill" in summary.read_text()
    (upload,) = [step for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert upload["if"] == "always()"
    assert (tmp_path / upload["with"]["path"] / "bench.json").exists()
    keeps = [
        step["run"] for step in workflow["jobs"]["keep"]["steps"] if "model-ci.sh" in step.get("run", "")
    ]
    assert keeps == ['.github/workflows/model-ci.sh keep "$SOURCE" kept']
