"""``--stages`` on the command line and from Python: what is made and what is refused, and that a folder of
stages is signed, run and kept like any other.
"""

from __future__ import annotations

import json
import shutil

import pytest

import llorch as front_door
from support.builders.checkpoints import write_hf_folder
from support.builders.signing_keys import write_keys
from support.harness.processes import llorch_here

PROMPT = ("--prompt", "Water boils at", "--max-tokens", "8", "--json")


@pytest.fixture(scope="module")
def staged(tiny_source, tmp_path_factory, export_here):
    return export_here(tiny_source, tmp_path_factory.mktemp("staged") / "out", "--stages", "2,at=1")


def test_a_folder_of_stages_answers_as_one_graph_and_is_up_to_date(staged, tiny, tiny_source):
    answers = [llorch_here("generate", folder, *PROMPT).document()["text"] for folder in (staged, tiny)]
    assert answers[0] == answers[1]
    again = ("export", tiny_source, "--output", staged, "--if-changed", "--json")
    assert llorch_here(*again, "--stages", "2,at=1").document()["changed"] is False


def test_it_is_signed_whole(staged, tmp_path):
    keys, folder = write_keys(tmp_path), shutil.copytree(staged, tmp_path / "signed")
    assert llorch_here("sign", folder, "--private-key", keys.private).code == 0
    flags = ("--verify-signature", keys.public)
    assert llorch_here("generate", folder, *PROMPT, *flags).code == 0
    with (folder / "stage1.onnx.data").open("r+b") as file:
        file.write(b"x")
    outcome = llorch_here("generate", folder, *PROMPT, *flags)
    assert outcome.code == 3
    assert "stage1.onnx.data" in outcome.error()


def test_a_dry_run_says_where_a_model_would_be_cut(tiny_source):
    outcome = llorch_here("export", tiny_source, "--stages", "2", "--dry-run")
    assert "stage 0: layers 0 to 0\nstage 1: layers 1 to 1\n" in outcome.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--stages", "two"), "expected a number of stages"),
        (("--stages", "1"), "needs no --stages"),
        (("--stages", "3"), "expected at most 2"),
        (("--stages", "2,at=2"), "from 1 to 1 in ascending order"),
        (("--stages", "2", "--embed", "mean"), "--stages 2 with --embed mean"),
        (("--stages", "2", "--interop", "genai"), "--stages 2 with --interop genai"),
        (("--stages", "2", "--target", "coreml"), "--stages 2 with --target coreml"),
        (("--stages", "2", "--via", "optimum"), "--stages 2 with --via optimum"),
    ],
)
def test_what_does_not_go_with_stages_is_refused(tiny_source, tmp_path, flags, said):
    outcome = llorch_here("export", tiny_source, "--output", tmp_path / "out", *flags)
    assert outcome.code == 2
    assert said in outcome.error()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_embeds_texts_unasked_is_not_cut(tmp_path):
    source = write_hf_folder(tmp_path / "model")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    outcome = llorch_here("export", source, "--output", tmp_path / "out", "--stages", "2")
    assert outcome.code == 2
    assert "--stages 2 with --embed mean" in outcome.error()
    assert (
        llorch_here("export", source, "--output", tmp_path / "out", "--stages", "2", "--embed", "none").code
        == 0
    )


@pytest.mark.parametrize("stages", [2, "2,at=1"])
def test_python_takes_a_number_or_the_flags_text(tiny_source, tmp_path, stages):
    folder = front_door.export(tiny_source, tmp_path / "out", precision="fp32", stages=stages).artifact.folder
    assert [s["first_layer"] for s in json.loads((folder / "llorch.json").read_text())["stages"]] == [0, 1]
