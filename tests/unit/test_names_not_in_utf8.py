"""Files whose names are no UTF-8, as old archives hold them: told in every form of output, and exported."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.source.open import fingerprint_files, open_checkpoint
from llorch_serve.files.text import encode_json, writable
from llorch_serve.loading.models import load_model
from llorch_serve.observe.logs import JsonFormatter
from llorch_serve.terminal.console import write, write_json
from support.builders.checkpoints import write_gguf, write_hf_folder
from support.builders.foreign_folders import write_optimum_folder
from support.builders.tiny_exports import silent

NAME = b"caf\xe9".decode("utf-8", "surrogateescape")
SHOWN = "caf\\udce9"


@pytest.mark.parametrize(
    ("text", "written"),
    [("café", "café"), (NAME, SHOWN), ("\ud800", "\\ud800"), ("\U0001f600", "\U0001f600")],
)
def test_what_is_no_text_is_written_as_an_escape(text: str, written: str) -> None:
    assert writable(text) == written
    assert json.loads(encode_json({text: [text, 1, {"a": (text,)}]})) == {
        written: [written, 1, {"a": [written]}]
    }


def test_a_line_of_the_log_is_written() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "%s is no folder", (NAME,), None)
    record.llorch_fields = {"folder": NAME}
    line = json.loads(JsonFormatter((f"secret of {NAME}",)).format(record))
    assert (line["human"], line["folder"]) == (f"{SHOWN} is no folder", SHOWN)


def test_results_are_written(capfd: pytest.CaptureFixture[str]) -> None:
    write(f"{NAME}\n")
    write_json({"folder": NAME})
    first, rest = capfd.readouterr().out.split("\n", 1)
    assert first == SHOWN
    assert json.loads(rest) == {"folder": SHOWN}


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_model_of_such_a_name_is_exported(tmp_path: Path, kind: str) -> None:
    source = tmp_path / NAME
    if kind == "folder":
        write_hf_folder(source)
        (source / f"LICENSE.{NAME}").write_text("terms")
    else:
        source = write_gguf(tmp_path / f"{NAME}.gguf")
    assert open_checkpoint(str(source)).name == SHOWN
    options = ExportOptions(source=str(source), output=tmp_path / "out", precision="fp32")
    assert export(options, silent).artifact.manifest.model_id == SHOWN
    assert (tmp_path / "out" / f"LICENSE.{SHOWN}").exists() == (kind == "folder")


def test_a_shard_of_such_a_name_counts_in_the_fingerprint(tmp_path: Path) -> None:
    for name in (NAME, "other"):
        (tmp_path / name).write_bytes(b"x")
    assert len(fingerprint_files([tmp_path / NAME, tmp_path / "other"])) == 64


def test_a_folder_of_another_tool_is_served_by_such_a_name(tmp_path: Path) -> None:
    model = load_model(write_optimum_folder(tmp_path / NAME))
    assert model.manifest.model_id == SHOWN
