"""``llorch eval`` on a tiny model, here and from a worker: figures, limits, baselines, and refusals."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llorch_serve.evaluation.schema import Evaluation, read_evaluation
from support.harness.processes import WorkerProcess, llorch_here

TEXT = "Once upon a time there was a small house by the river.\nNobody lived in it. " * 12


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "house.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def other(
    tiny_source: Path, export_here: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same model in fp32."""
    return export_here(tiny_source, tmp_path_factory.mktemp("fp32") / "artifact", "--precision", "fp32")


def figures(outcome: Any) -> dict[str, Any]:
    """Return what a document says of texts and tasks, which is the same in every run."""
    document = outcome.document()
    return {name: document[name] for name in ("texts", "tasks", "settings", "fidelity")}


def test_here_and_at_a_worker_figures_are_the_same_in_every_run(
    tiny: Path, tiny_worker: WorkerProcess, text: Path
) -> None:
    flags = ("--text", text, "--window", "64", "--stride", "16", "--json")
    first = llorch_here("eval", tiny, *flags)
    assert figures(llorch_here("eval", tiny, *flags)) == figures(first)
    there = llorch_here("eval", "--connect", tiny_worker.address, *flags)
    assert figures(there)["texts"] == figures(first)["texts"]
    assert there.document()["fidelity"] is None
    assert there.document()["model"]["address"] == tiny_worker.address
    model = first.document()["model"]
    manifest = json.loads((tiny / "llorch.json").read_text())
    assert (model["fingerprint"], model["model_id"]) == (manifest["fingerprint"], manifest["model_id"])
    assert first.document()["fidelity"] == {"kl_limit": manifest["recipe"]["kl_limit"]}
    [found] = first.document()["texts"]
    assert (found["window"], found["stride"], found["bytes"]) == (64, 16, len(TEXT))
    assert found["perplexity"] == pytest.approx(math.exp(-found["log_likelihood"] / found["tokens"]))


def test_without_flags_the_text_that_comes_with_llorch_is_read(tiny: Path) -> None:
    lines = llorch_here("eval", tiny).stdout.splitlines()
    heading = next(line for line in lines if line.startswith("text "))
    assert heading.split() == [
        "text",
        "tokens",
        "window/stride",
        "perplexity",
        "by",
        "word",
        "by",
        "byte",
        "bits/byte",
    ]
    assert lines[lines.index(heading) + 1].startswith("sample ")


def test_several_texts_are_shown_each_and_together(tiny: Path, text: Path) -> None:
    document = llorch_here("eval", tiny, "--text", text, "--text", "sample", "--json").document()
    first, second, both = document["texts"]
    assert [first["name"], second["name"], both["name"]] == [str(text), "sample", "all"]
    assert both["tokens"] == first["tokens"] + second["tokens"]


def test_limits_are_kept_or_missed(tiny: Path, text: Path) -> None:
    flags = ("--text", text)
    assert (
        llorch_here("eval", tiny, *flags, "--at-most", "perplexity=1e6", "--at-least", "perplexity=1").code
        == 0
    )
    outcome = llorch_here(
        "eval", tiny, *flags, "--json", "--at-most", "perplexity=2", "--at-least", "bits_per_byte=99"
    )
    assert outcome.code == 1
    lines = outcome.stderr.splitlines()
    assert [line.split(" is ")[0] for line in lines] == ["error: bits_per_byte", "error: perplexity"]
    assert lines[1].endswith("missed --at-most perplexity=2")
    assert json.loads(outcome.stdout)["texts"]


@pytest.mark.reference
def test_divergence_is_measured_against_a_kept_reference(
    tiny: Path, tiny_source: Path, text: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    assert llorch_here("verify", tiny, "--against", tiny_source, "--write-reference", kept).code == 0
    verified = llorch_here("verify", tiny, "--reference", kept, "--json").document()
    flags = ("--text", text, "--reference", kept)
    outcome = llorch_here("eval", tiny, *flags, "--at-most", "kl=9", "--at-least", "top1=0.5", "--json")
    assert outcome.code == 0
    measured = outcome.document()["fidelity"]["measured"]
    for name in ("kl", "top1", "tokens", "limit", "passed", "oracle"):
        assert measured[name] == verified[name]
    assert "top-1" in llorch_here("eval", tiny, *flags).stdout
    assert llorch_here("eval", tiny, *flags, "--at-most", "kl=1e-9").code == 1


def test_a_model_is_compared_with_a_baseline(tiny: Path, other: Path, text: Path, tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(llorch_here("eval", other, "--text", text, "--json").stdout)
    assert isinstance(read_evaluation(before), Evaluation)
    same = llorch_here("eval", other, "--text", text, "--baseline", before, "--fail-if-worse", "--json")
    assert same.code == 0
    assert [one["verdict"] for one in same.document()["comparison"]["differences"]] == ["same"]
    now = llorch_here("eval", tiny, "--text", text, "--baseline", before, "--json").document()["comparison"]
    [one] = now["differences"]
    assert one["name"] == "perplexity"
    assert one["paired"]
    assert one["stderr"] > 0
    edited = json.loads(before.read_text())
    edited["texts"][0] |= {
        "blocks": [block + 30 for block in edited["texts"][0]["blocks"]],
        "perplexity": 9.0,
    }
    before.write_text(json.dumps(edited))
    worse = llorch_here("eval", other, "--text", text, "--baseline", before, "--fail-if-worse")
    assert worse.code == 1
    assert "worse than noise" in worse.stdout
    assert "error: perplexity is " in worse.stderr
    assert llorch_here("eval", other, "--text", text, "--baseline", before).code == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--text", "NOTHING"), "--text NOTHING cannot be read"),
        (("--text", "EMPTY"), "is empty"),
        (("--text", "BYTES"), "cannot be read as UTF-8"),
        (("--text", "sample", "--text", "sample"), "names a file twice"),
        (("--window", "9999"), "--window is 9999 and the model's context"),
        (("--window", "8", "--stride", "9"), "--stride is 9; expected at most --window, 8"),
        (("--limit", "3"), "--limit has no effect without --tasks"),
        (("--tasks", "a", "--stride", "3"), "--stride has no effect without a text"),
        (("--tasks", "a", "--limit", "1.5"), "--limit is 1.5"),
        (("--tasks", "a,,b"), "--tasks is 'a,,b'"),
        (("--tasks", "a", "--task-folder", "NOTHING"), "which is no folder"),
        (("--at-most", "perplexity"), "expected FIGURE=NUMBER"),
        (("--at-least", "arc.acc=1"), "no task is run; add --tasks TASK"),
        (("--fail-if-worse",), "no effect without --baseline"),
        (("--baseline", "NOTHING"), "cannot be read"),
        (("--baseline", "EMPTY"), "is no evaluation of schema version 1"),
        (("--wait", "3"), "--wait has no effect without --connect"),
    ],
)
def test_what_cannot_be_is_refused(tiny: Path, tmp_path: Path, flags: tuple[str, ...], says: str) -> None:
    (tmp_path / "EMPTY").write_bytes(b"")
    (tmp_path / "BYTES").write_bytes(b"\xff\xfe")
    named = [str(tmp_path / flag) if flag in ("EMPTY", "BYTES") else flag for flag in flags]
    outcome = llorch_here("eval", tiny, *named)
    assert outcome.code == 2, outcome
    assert says in outcome.error()
    assert outcome.stdout == ""


@pytest.mark.parametrize("flags", [("--slots", "2"), ("--reference", "x"), ("--threads", "1")])
def test_what_means_nothing_to_a_worker_is_refused(flags: tuple[str, ...]) -> None:
    outcome = llorch_here("eval", "--connect", "127.0.0.1:1", *flags)
    assert outcome.code == 2
    assert f"{flags[0]} has no effect on the worker" in outcome.error()


def test_a_reference_of_another_model_and_a_folder_that_is_none_are_refused(
    tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "kept").write_bytes(b"nothing")
    outcome = llorch_here("eval", tiny, "--reference", tmp_path / "kept")
    assert (outcome.code, "is not a reference" in outcome.error()) == (3, True)
    assert llorch_here("eval", tmp_path / "nowhere").code == 3
    assert llorch_here("eval", "--connect", "127.0.0.1:1", "--text", "sample").code == 7


def test_without_lm_eval_a_task_says_what_to_install(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    outcome = llorch_here("eval", tiny, "--tasks", "arc_easy")
    assert outcome.code == 4
    assert "pip install 'llorch[eval]'" in outcome.error()
