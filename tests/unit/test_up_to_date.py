"""``--if-changed`` takes an artifact for up to date only where an export would leave the very same one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llorch_export.adapter.choice import AdapterChoice
from llorch_export.graph.stage_choice import StageChoice
from llorch_export.options import ExportOptions, Rule
from llorch_export.pipeline import export
from llorch_serve.artifact.folder import MANIFEST_NAME
from support.builders.adapters import write_adapter
from support.builders.checkpoints import tiny_llama_config, write_gguf, write_hf_folder
from support.builders.tiny_exports import contents, silent

TEXT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "model")


def changed(source: Path, output: Path, **options: Any) -> bool:
    return export(ExportOptions(str(source), output, if_changed=True, **options), silent).changed


# -- the artifact itself
# -----------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(path: Path, key: str, value: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def of_another_reading(folder: Path, name: str) -> None:
    """Leave what a llorch would leave that reads a source's text files otherwise."""
    content = (folder / name).read_bytes() + b"\n"
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    for entry in manifest["files"]:
        if entry["path"] == name:
            entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of the weights": lambda folder: flip(folder / "model.onnx.data"),
    "a bit of the graph": lambda folder: flip(folder / "model.onnx"),
    "a bit of the tokenizer": lambda folder: flip(folder / "tokenizer.json"),
    "a tokenizer that was read otherwise": lambda folder: of_another_reading(folder, "tokenizer.json"),
    "a template that was read otherwise": lambda folder: of_another_reading(folder, "chat_template.jinja"),
    "a file more": lambda folder: (folder / "stray.txt").write_bytes(b"x"),
    "a folder more": lambda folder: (folder / "stray").mkdir(),
    "a file less": lambda folder: (folder / "model.onnx.data").unlink(),
    "a link in a file's place": lambda folder: (
        (folder / "model.onnx").rename(folder.parent / "m")
        and (folder / "model.onnx").symlink_to(folder.parent / "m")
    ),
    "another id": lambda folder: edit(folder / MANIFEST_NAME, "model_id", "other"),
    "another context": lambda folder: edit(folder / MANIFEST_NAME, "context_length", 64),
    "other stop tokens": lambda folder: edit(folder / MANIFEST_NAME, "stop_token_ids", [5]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_as_it_was_made_is_made_anew(tmp_path: Path, model: Path, damage: str) -> None:
    output = tmp_path / "out"
    assert changed(model, output)
    whole = contents(output)
    DAMAGES[damage](output)
    assert changed(model, output)
    assert contents(output) == whole
    assert not any(path.is_symlink() or path.is_dir() for path in output.iterdir())
    assert not changed(model, output)


def test_reading_the_artifact_is_told_as_progress(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "out"
    changed(model, output)
    told: dict[str, list[tuple[int, int]]] = {}
    options = ExportOptions(str(model), output, if_changed=True)
    assert not export(options, lambda phase, n, total: told.setdefault(phase, []).append((n, total))).changed
    size = sum(path.stat().st_size for path in output.iterdir() if path.name != MANIFEST_NAME)
    assert sum(n for n, _ in told["checking the artifact"]) == size
    assert {total for _, total in told["checking the artifact"]} == {size}


# -- where the source's names go
# ---------------------------------------------------------------------------------------


def test_a_renamed_source_gives_another_id(tmp_path: Path) -> None:
    output = tmp_path / "out"
    folder = write_hf_folder(tmp_path / "model")
    assert changed(folder, output)
    folder = folder.rename(tmp_path / "other")
    assert changed(folder, output)
    assert json.loads((output / MANIFEST_NAME).read_text())["model_id"] == "other"
    assert not changed(folder, output)
    shutil.copytree(folder, tmp_path / "elsewhere" / "other")  # where it lies is recorded nowhere
    assert not changed(tmp_path / "elsewhere" / "other", output)


def test_a_renamed_file_gives_another_id(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = write_gguf(tmp_path / "a" / "model.gguf")
    assert changed(file, tmp_path / "out")
    assert changed(file.rename(tmp_path / "a" / "other.gguf"), tmp_path / "out")
    assert not changed(tmp_path / "a" / "other.gguf", tmp_path / "out")


def test_a_renamed_adapter_is_named(tmp_path: Path, model: Path) -> None:
    adapter = tmp_path / "one"
    write_adapter(adapter, tiny_llama_config())
    assert changed(model, tmp_path / "out", lora=(AdapterChoice(adapter),))
    assert changed(model, tmp_path / "out", lora=(AdapterChoice(adapter.rename(tmp_path / "two")),))
    assert json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())["source"]["adapter"] == "two"


# -- every option
# ------------------------------------------------------------------------------------------------------

INT4: dict[str, Any] = {"precision": "int4", "quantizer": "affine"}
NO_PART = {
    "output": {},
    "force": {"force": True},
    "if_changed": {},
}
"""Options that decide no byte of the artifact."""

VARIED: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "precision": [({}, {"precision": "fp32"}), ({}, INT4)],
    "head_precision": [({}, {"head_precision": "fp32"})],
    "block_size": [({}, {"block_size": 64})],
    "fine_block_size": [({}, {"fine_block_size": 16})],
    "accuracy_level": [({}, {"accuracy_level": 0})],
    "quantizer": [(INT4, {"quantizer": name}) for name in ("nearest", "search", "hqq")],
    "scale_type": [({}, {"scale_type": "bfloat16"})],
    "max_context": [({}, {"max_context": 64})],
    "stages": [({}, {"stages": StageChoice(2)})],
    "interop": [({}, {"interop": "genai"})],
    "compute_type": [({}, {"compute_type": "bfloat16"})],
    "target": [({}, {"target": "portable"})],
    "kv_dtype": [({}, {"kv_dtype": "float32"})],
    "kl_limit": [({}, {"kl_limit": 0.5})],
    "embed": [({}, {"embed": "mean"}), ({"embed": "mean"}, {"embed": "last"})],
    "activations": [({}, {"activations": "row"}), ({"activations": "row"}, {"activations": "quarters"})],
    "transforms": [({}, {"transforms": (name,)}) for name in ("rotate", "hadamard")],
}
OTHERWISE = {
    "source",
    "lora",
    "calibration",
    "prompts",
    "rules",
    "two_bit_accuracy_level",
}  # have tests of their own


def test_every_option_is_thought_of() -> None:
    names = {field.name for field in dataclasses.fields(ExportOptions)}
    assert names == NO_PART.keys() | VARIED.keys() | OTHERWISE


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in VARIED for case in VARIED[name]])
def test_an_option_that_decides_bytes_is_compared(
    tmp_path: Path, model: Path, name: str, case: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    base, other = case
    assert name in other
    assert changed(model, tmp_path / "out", **base)
    before = contents(tmp_path / "out")
    assert changed(model, tmp_path / "out", **(base | other))
    assert contents(tmp_path / "out") != before
    assert not changed(model, tmp_path / "out", **(base | other))


@pytest.mark.parametrize("name", NO_PART)
def test_an_option_that_decides_no_byte_is_not(tmp_path: Path, model: Path, name: str) -> None:
    for output in (tmp_path / "a", tmp_path / "b"):
        options: dict[str, Any] = {"output": output, **(NO_PART[name] if output.name == "b" else {})}
        export(ExportOptions(str(model), **options), silent)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert not changed(model, tmp_path / "b")


def test_a_graph_for_prompts_and_its_options_are_compared(tmp_path: Path, model: Path) -> None:
    output = tmp_path / "out"

    def prompts(**options: Any) -> ExportOptions:
        return ExportOptions(str(model), output, **({"precision": "int4", "quantizer": "affine"} | options))

    for options in (
        {},
        {"prompts": prompts()},
        {"prompts": prompts(quantizer="nearest")},
        {"prompts": prompts(block_size=32)},
        {"prompts": prompts(rules=(Rule(("*.down_proj",), precision="fp32"),))},
        {"prompts": prompts(kl_limit=0.3)},
    ):
        assert changed(model, output, **options)
        assert not changed(model, output, **options)


def test_a_calibration_text_is_compared_by_its_bytes(tmp_path: Path, model: Path) -> None:
    text = tmp_path / "text"
    options: dict[str, Any] = {"transforms": ("smooth",), "calibration": text}
    for content in (TEXT, TEXT + "And then."):
        text.write_text(content)
        assert changed(model, tmp_path / "out", **options)
        assert not changed(model, tmp_path / "out", **options)


def rule(*modules: str, **options: Any) -> Rule:
    return Rule(modules, **options)


FIRST, DOWN = "model.layers.0.mlp.down_proj", "*.down_proj"
PEAKED = rule(DOWN, precision="fp32", outliers="1")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((rule(DOWN, block_size=64),), (rule(DOWN, block_size=16),)),
        ((rule(DOWN, block_size=64),), (rule(FIRST, block_size=64),)),
        ((rule(DOWN, precision="fp32"),), (rule(DOWN, layers=("first 1",), precision="fp32"),)),
        # Until the text has been measured, the first module stands for the one that will be chosen.
        ((rule(FIRST, block_size=64), PEAKED), (rule(FIRST, block_size=16), PEAKED)),
        ((rule(FIRST, block_size=64), PEAKED), (PEAKED,)),
        ((rule(FIRST, precision="int4"), PEAKED), (rule(FIRST, precision="fp32"), PEAKED)),
        ((PEAKED,), (rule(DOWN, precision="fp32", outliers="1", layers=("first 1",)),)),
        (
            (rule(DOWN, block_size=64, outliers="1"), PEAKED),
            (rule(DOWN, block_size=16, outliers="1"), PEAKED),
        ),
        (
            (PEAKED, rule("*.up_proj", precision="fp32", outliers="1")),
            (PEAKED, rule("*.up_proj", block_size=64, outliers="1")),
        ),
    ],
)
def test_rules_that_may_come_to_something_else_are_told_apart(
    tmp_path: Path, model: Path, one: tuple[Rule, ...], other: tuple[Rule, ...]
) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    options: dict[str, Any] = {}
    if any(found.outliers for found in (*one, *other)):
        options["calibration"] = text
    for rules in (one, other):
        assert changed(model, tmp_path / "out", rules=rules, **options)
        assert not changed(model, tmp_path / "out", rules=rules, **options)


def test_rules_of_prompts_that_may_come_to_something_else_are_told_apart(tmp_path: Path, model: Path) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    for size in (64, 16):
        prompts = ExportOptions(
            str(model), tmp_path / "out", precision="int8", rules=(rule(FIRST, block_size=size), PEAKED)
        )
        options: dict[str, Any] = {"precision": "int8", "prompts": prompts, "calibration": text}
        assert changed(model, tmp_path / "out", **options)
        assert not changed(model, tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((rule(DOWN, precision="fp32"),), (rule(DOWN, precision="fp32", label="another"),)),
        (
            (rule("*.mlp.*", block_size=64), rule(DOWN, block_size=16)),
            (rule("*.{up,gate}_proj", block_size=64), rule(DOWN, block_size=16)),
        ),
        (  # what a later rule settles whatever a text shows
            (
                rule("*.mlp.*", block_size=64),
                rule(DOWN, block_size=16),
                rule("*.up_proj", outliers="1", precision="fp32"),
            ),
            (
                rule("*.{up,gate}_proj", block_size=64),
                rule(DOWN, block_size=16),
                rule("*.up_proj", outliers="1", precision="fp32"),
            ),
        ),
    ],
)
def test_rules_that_come_to_the_same_are_the_same(
    tmp_path: Path, model: Path, one: tuple[Rule, ...], other: tuple[Rule, ...]
) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    options: dict[str, Any] = {"calibration": text} if any(found.outliers for found in one) else {}
    assert changed(model, tmp_path / "out", rules=one, **options)
    assert not changed(model, tmp_path / "out", rules=other, **options)


# -- a signature
# -----------------------------------------------------------------------------------------------


def test_a_signed_artifact_is_up_to_date_and_keeps_its_signature(model: Path, tmp_path: Path) -> None:
    assert changed(model, tmp_path / "out")
    (tmp_path / "out" / "model.sig").write_bytes(b"signature")
    assert not changed(model, tmp_path / "out")
    assert (tmp_path / "out" / "model.sig").read_bytes() == b"signature"
    flip(tmp_path / "out" / "model.onnx.data")
    assert changed(model, tmp_path / "out")
    assert not (tmp_path / "out" / "model.sig").exists()
