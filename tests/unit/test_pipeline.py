"""An export from end to end: what lands in the folder, when it is refused, and that it is repeatable."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest

from llorch_export import pipeline
from llorch_export.checkpoint import lazy_parts
from llorch_export.options import ExportOptions
from llorch_export.pipeline import ExportResult, export
from llorch_export.recipes.base import base_recipe
from llorch_serve.artifact.folder import load_artifact
from llorch_serve.artifact.manifest import SCHEMA_VERSION, GenerationDefaults
from llorch_serve.errors import ArtifactError, LlorchError, NewerSchemaError, UsageError
from support.builders.checkpoints import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    TURN_END_ID,
    Weights,
    write_gguf,
    write_hf_folder,
)
from support.builders.tiny_exports import all_logits, contents, export_tiny, random_ids, silent

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "model")


def run(source: Path, output: Path, **options: Any) -> ExportResult:
    return export(ExportOptions(source=str(source), output=output, **options), silent)


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_exporting_twice_gives_the_same_bytes(tmp_path: Path, model: Path, precision: str) -> None:
    first = run(model, tmp_path / "first", precision=precision)
    second = run(model, tmp_path / "second", precision=precision)
    assert first.changed
    assert second.changed
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_every_file_is_listed_with_its_hash_and_nothing_else_is_there(tmp_path: Path, model: Path) -> None:
    (model / "LICENSE").write_text("terms")
    (model / "NOTICE.txt").write_text("notice")
    (model / "USE_POLICY.md").write_text("policy")
    artifact = export_tiny(model, tmp_path / "out")
    listed = {entry.path: entry for entry in artifact.manifest.files}
    found = contents(tmp_path / "out")
    assert set(found) == set(listed) | {"llorch.json"}
    assert set(listed) == {
        "LICENSE",
        "NOTICE.txt",
        "USE_POLICY.md",
        "chat_template.jinja",
        "model.onnx",
        "model.onnx.data",
        "tokenizer.json",
    }
    for name, entry in listed.items():
        assert entry.bytes == len(found[name])
        assert entry.sha256 == hashlib.sha256(found[name]).hexdigest()
    assert found["LICENSE"] == b"terms"
    load_artifact(tmp_path / "out", verify_hashes=True)


def test_a_licence_file_of_absurd_size_is_refused(tmp_path: Path, model: Path) -> None:
    with (model / "LICENSE").open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(ArtifactError, match=r"LICENSE has more than 1048576 bytes"):
        export_tiny(model, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_the_manifest_fits_the_published_schema(tmp_path: Path, kind: str, precision: str) -> None:
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    source = (
        write_hf_folder(tmp_path / "model", scaling)
        if kind == "folder"
        else write_gguf(tmp_path / "model.gguf", scaling, extra={"rope_freqs.weight": np.ones(8, np.float32)})
    )
    export_tiny(source, tmp_path / "out", precision=precision)
    schema = json.loads((REPOSITORY / "artifacts" / "manifest.schema.json").read_text())
    manifest = json.loads((tmp_path / "out" / "llorch.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(manifest)
    assert manifest["source"]["kind"] == ("safetensors" if kind == "folder" else "gguf")


def test_text_side_lands_in_the_manifest(tmp_path: Path) -> None:
    source = write_hf_folder(
        tmp_path / "tiny-chat",
        generation_config={
            "eos_token_id": [EOS_ID, TURN_END_ID],
            "temperature": 0.6,
            "top_p": 0.9,
            "do_sample": True,
        },
    )
    artifact = export_tiny(source, tmp_path / "out", precision="int8", max_context=64)
    manifest = artifact.manifest
    assert manifest.model_id == "tiny-chat"
    assert manifest.stop_token_ids == (EOS_ID, TURN_END_ID)
    assert manifest.bos_token_id == BOS_ID
    assert manifest.generation == GenerationDefaults(temperature=0.6, top_p=0.9)
    assert artifact.chat_templates() == {"default": CHAT_TEMPLATE}
    assert manifest.context_length == 64
    assert manifest.model.max_position_embeddings == 128
    assert manifest.recipe == base_recipe(ExportOptions(source="", output=Path()))
    assert set(manifest.versions) == {"llorch", "onnx-ir", "numpy"}


def test_an_artifact_carries_every_template(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    source = write_hf_folder(tmp_path / "model", tokenizer_config={"chat_template": named})
    artifact = export_tiny(source, tmp_path / "out")
    assert artifact.manifest.other_chat_templates == {"tool_use": "chat_template.tool_use.jinja"}
    assert artifact.chat_templates() == {"default": "plain", "tool_use": "tools"}
    (tmp_path / "out" / "chat_template.tool_use.jinja").unlink()
    with pytest.raises(ArtifactError, match="tool_use"):
        load_artifact(tmp_path / "out")


def test_a_model_without_template_and_stop_token_says_so_in_the_manifest(tmp_path: Path) -> None:
    source = write_hf_folder(
        tmp_path / "model",
        {"eos_token_id": None},
        tokenizer_config={"chat_template": None, "eos_token": None},
    )
    artifact = export_tiny(source, tmp_path / "out")
    assert artifact.manifest.chat_template is None
    assert artifact.manifest.stop_token_ids == ()
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_signature_and_kv_layout_are_those_of_the_graph(tmp_path: Path, model: Path) -> None:
    artifact = export_tiny(model, tmp_path / "out", precision="int8")
    graph = onnx.load(artifact.graph_path, load_external_data=False).graph
    names = {
        onnx.TensorProto.FLOAT: "float32",
        onnx.TensorProto.INT32: "int32",
        onnx.TensorProto.INT64: "int64",
    }

    def signature(values: Any) -> list[tuple[str, str, tuple[int | str, ...]]]:
        return [
            (
                value.name,
                names[value.type.tensor_type.elem_type],
                tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim),
            )
            for value in values
        ]

    manifest = artifact.manifest
    assert signature(graph.input) == [(s.name, s.dtype, s.shape) for s in manifest.inputs]
    assert signature(graph.output) == [(s.name, s.dtype, s.shape) for s in manifest.outputs]
    kv = manifest.kv
    assert (kv.layers, kv.kv_heads, kv.head_dim) == (2, 2, 16)
    expected = {kv.past_name.format(layer=i, kind=k) for i in range(2) for k in ("key", "value")}
    assert expected < {s.name for s in manifest.inputs}


def test_weights_lie_outside_the_model_file(tmp_path: Path, model: Path) -> None:
    artifact = export_tiny(model, tmp_path / "out")
    for tensor in onnx.load(artifact.graph_path, load_external_data=False).graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            assert len(tensor.raw_data) <= 64, tensor.name
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        assert entries["location"] == "model.onnx.data"
        assert int(entries["offset"]) % 64 == 0
    assert artifact.graph_path.stat().st_size < 64 * 1024


def test_the_model_passes_the_onnx_checker(tmp_path: Path, model: Path) -> None:
    artifact = export_tiny(model, tmp_path / "out", precision="int8")
    onnx.checker.check_model(str(artifact.graph_path))


def test_a_moved_artifact_loads_from_anywhere(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(20)
    expected = all_logits(export_tiny(model, tmp_path / "out"), ids)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").rename(tmp_path / "elsewhere" / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    np.testing.assert_array_equal(all_logits(load_artifact(Path("moved")), ids), expected)
    monkeypatch.chdir(tmp_path / "elsewhere" / "moved")
    np.testing.assert_array_equal(all_logits(load_artifact(Path()), ids), expected)


def test_replacing_leaves_nothing_of_the_old_artifact(tmp_path: Path, model: Path) -> None:
    (model / "LICENSE").write_text("terms")
    export_tiny(model, tmp_path / "out", precision="fp32")
    (model / "LICENSE").unlink()
    export_tiny(model, tmp_path / "out", precision="int8", force=True)
    export_tiny(model, tmp_path / "fresh", precision="int8")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fresh", "model", "out"]


def test_progress_tells_all_of_every_phase(tmp_path: Path, model: Path) -> None:
    told: dict[str, list[int]] = {}
    totals: dict[str, set[int]] = {}

    def progress(phase: str, done: int, total: int) -> None:
        told.setdefault(phase, []).append(done)
        totals.setdefault(phase, set()).add(total)

    export(ExportOptions(source=str(model), output=tmp_path / "out"), progress)
    assert list(told) == ["reading source", "writing weights", "measuring the KV cache"]
    for phase, parts in told.items():
        assert totals[phase] == {sum(parts)}


# -- refusals and failures
# ---------------------------------------------------------------------------------------


def damaged(error: BaseException) -> Callable[..., Any]:
    """Return a reader that fails at the ninth tensor, when part of the weights is on the disk."""
    real, count = lazy_parts.read_rows, 0

    def read(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 9:
            raise error
        return real(*args, **options)

    return read


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("error", [ArtifactError("damaged"), KeyboardInterrupt(), MemoryError()])
def test_a_failure_while_writing_leaves_everything_as_it_was(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, existing: bool
) -> None:
    output = tmp_path / "out"
    if existing:
        export_tiny(model, output, precision="int4")
    before = contents(tmp_path)
    monkeypatch.setattr(lazy_parts, "read_rows", damaged(error))
    with pytest.raises(type(error)):
        run(model, output, precision="int8", force=existing)
    assert contents(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == (["model", "out"] if existing else ["model"])


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_nan_in_a_weight_is_refused_by_name_and_leaves_nothing(tmp_path: Path, precision: str) -> None:
    def edit(weights: Weights) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan

    source = write_hf_folder(tmp_path / "model", edit=edit)
    with pytest.raises(ArtifactError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        run(source, tmp_path / "out", precision=precision)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_folder_whose_self_check_fails_is_not_put_in_place(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> Any:
        raise ArtifactError(f"{folder} is damaged")

    monkeypatch.setattr(pipeline, "load_artifact", refuse)
    with pytest.raises(ArtifactError, match="is damaged"):
        run(model, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("options", [{}, {"force": True}, {"if_changed": True}])
def test_a_file_or_a_foreign_folder_is_refused_before_the_source_is_read(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_bytes(b"precious")
    before = contents(tmp_path)
    for output in (tmp_path / "file", tmp_path / "folder"):
        with pytest.raises(UsageError, match=str(output)):
            run(tmp_path / "no-such-model", output, **options)
    assert contents(tmp_path) == before


def test_an_artifact_is_refused_without_force(tmp_path: Path, model: Path) -> None:
    export_tiny(model, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(UsageError, match="already holds an artifact; replace it with --force"):
        run(model, tmp_path / "out")
    assert contents(tmp_path / "out") == before


# -- --if-changed
# ------------------------------------------------------------------------------------------------


def test_if_changed_does_nothing_where_nothing_changed(tmp_path: Path, model: Path) -> None:
    assert run(model, tmp_path / "out", if_changed=True).changed
    before, times = contents(tmp_path / "out"), stamps(tmp_path / "out")
    result = run(model, tmp_path / "out", if_changed=True)
    assert not result.changed
    assert result.artifact.folder == tmp_path / "out"
    assert contents(tmp_path / "out") == before
    assert stamps(tmp_path / "out") == times


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "int4"},
        {"block_size": 64},
        {"head_precision": "fp32"},
        {"accuracy_level": 0},
        {"max_context": 64},
    ],
)
def test_if_changed_exports_anew_for_another_recipe(
    tmp_path: Path, model: Path, options: dict[str, Any]
) -> None:
    before = run(model, tmp_path / "out").artifact.manifest
    result = run(model, tmp_path / "out", if_changed=True, **options)
    assert result.changed
    assert result.artifact.manifest.fingerprint != before.fingerprint
    assert result.artifact.manifest.source == before.source
    assert not run(model, tmp_path / "out", if_changed=True, **options).changed


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_if_changed_exports_anew_for_another_source(tmp_path: Path, model: Path, name: str) -> None:
    before = run(model, tmp_path / "out").artifact.manifest
    path = model / name
    if name == "model.safetensors":
        write_hf_folder(model, seed=1)
    elif name == "config.json":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-3}))
    else:
        path.write_text(path.read_text() + "\n")
    result = run(model, tmp_path / "out", if_changed=True)
    assert result.changed
    assert result.artifact.manifest.source.fingerprint != before.source.fingerprint


@pytest.mark.parametrize("damage", ["missing file", "cut file", "not a manifest"])
def test_if_changed_repairs_a_damaged_artifact(tmp_path: Path, model: Path, damage: str) -> None:
    run(model, tmp_path / "out")
    whole = contents(tmp_path / "out")
    if damage == "missing file":
        (tmp_path / "out" / "model.onnx.data").unlink()
    elif damage == "cut file":
        (tmp_path / "out" / "model.onnx").write_bytes(b"cut")
    else:
        (tmp_path / "out" / "llorch.json").write_bytes(b"{")
    assert run(model, tmp_path / "out", if_changed=True).changed
    assert contents(tmp_path / "out") == whole


def test_if_changed_leaves_a_newer_artifact_alone(tmp_path: Path, model: Path) -> None:
    """It is not damaged: an older llorch would throw away what a newer one made, and no worker of today's
    would start.
    """
    run(model, tmp_path / "out")
    (tmp_path / "out" / "llorch.json").write_text(
        json.dumps({"schema_version": SCHEMA_VERSION + 1, "anything": "new"})
    )
    before = contents(tmp_path / "out")
    with pytest.raises(NewerSchemaError, match=r"schema version \d+; this llorch reads up to .* Upgrade"):
        run(model, tmp_path / "out", if_changed=True)
    assert contents(tmp_path / "out") == before
    assert run(model, tmp_path / "out", force=True).changed


def test_if_changed_exports_anew_for_other_terms(tmp_path: Path, model: Path) -> None:
    before = run(model, tmp_path / "out").artifact.manifest
    for terms in ("terms", "other terms", None):
        (model / "LICENSE").write_text(terms) if terms else (model / "LICENSE").unlink()
        result = run(model, tmp_path / "out", if_changed=True)
        assert result.changed
        assert result.artifact.manifest.source == before.source
        assert contents(tmp_path / "out").get("LICENSE") == (terms.encode() if terms else None)
        assert not run(model, tmp_path / "out", if_changed=True).changed
    assert result.artifact.manifest.fingerprint == before.fingerprint


# -- in a process of its own
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_the_environment_does_not_reach_the_bytes(tmp_path: Path, model: Path, precision: str) -> None:
    """Other processes, hash seeds, locales, masks, times, umasks and working directories: the same
    artifact.
    """
    export_tiny(model, tmp_path / "here", precision=precision)
    expected = contents(tmp_path / "here")
    code = (
        "import os, sys; os.umask(int(sys.argv[2], 8)); from pathlib import Path; "
        "from llorch_export.options import ExportOptions; from llorch_export.pipeline import export; "
        "export(ExportOptions(source=sys.argv[3], output=Path(sys.argv[4]), precision=sys.argv[1]), lambda "
        "*a: None)"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    runs = (
        ("1", "C", "Asia/Tokyo", "000", tmp_path, "model", 0),
        ("12345", "C.UTF-8", "America/Lima", "077", elsewhere, "../model", 2**31),
    )
    for seed, locale, zone, umask, folder, source, modified in runs:
        for path in model.iterdir():
            os.utime(path, (modified, modified))
        environment = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale, "TZ": zone}
        command = [sys.executable, "-c", code, precision, umask, source, f"there-{seed}"]
        subprocess.run(command, check=True, cwd=folder, env=environment)
        assert contents(folder / f"there-{seed}") == expected, seed


def test_errors_are_one_line(tmp_path: Path, model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(LlorchError) as caught:
        run(model, tmp_path / "out")
    assert "\n" not in str(caught.value)
