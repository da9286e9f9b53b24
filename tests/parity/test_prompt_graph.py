"""A graph of its own for prompts: what it computes, what it shares with the first one, and who runs where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from llorch_export.options import ExportOptions, Rule
from llorch_export.pipeline import export
from llorch_export.preview import preview
from llorch_serve.artifact.folder import Artifact, load_artifact
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.providers import takes_no_rows
from llorch_serve.runtime import opening as session_opening
from llorch_serve.runtime.opening import open_session
from llorch_serve.runtime.session import DecoderSession
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import contents, export_tiny, random_ids, silent

ROWS: dict[str, Any] = {
    "precision": "int8",
    "activations": "row",
    "rules": (Rule(("*.mlp.down_proj",), activations="block"),),
    "kv_dtype": "float32",
}
IDS = random_ids(40)


def prompts(**options: Any) -> ExportOptions:
    return ExportOptions("", Path(), **{**ROWS, **options})


def opened(artifact: Artifact, **options: Any) -> DecoderSession:
    return open_session(artifact, SessionConfig(threads=1, slots=3, **options), lambda _report: None)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("prompts") / "source")


@pytest.fixture(scope="module", params=["int8", "int4", "rotated"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "rotated":
        return {"precision": "int8", "transforms": ("rotate", "hadamard")}
    return {"precision": request.param}


@pytest.fixture(scope="module")
def artifact(source: Path, options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("two") / "artifact"
    own = prompts(transforms=options.get("transforms", ()))
    return export_tiny(source, folder, prompts=own, **options)


@pytest.fixture(scope="module")
def alone(source: Path, options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The prompts' recipe as an artifact of its own."""
    folder = tmp_path_factory.mktemp("alone") / "artifact"
    return export_tiny(source, folder, **{**ROWS, "transforms": options.get("transforms", ())})


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_prompts_are_computed_as_by_their_recipe_alone(
    artifact: Artifact, alone: Artifact, kv_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORT_GQA_DISABLE_FLASH_ATTENTION", "1")  # the kernel that prompts have
    session = opened(artifact, kv_dtype=kv_dtype)
    assert session.capabilities.separate_prompts
    found = session.prefill(1, IDS, 0, range(40)).copy()
    assert np.array_equal(found, opened(alone).prefill(1, IDS, 0, range(40)))
    single = opened(artifact, kv_dtype=kv_dtype, single_graph=True).prefill(1, IDS, 0, range(40))
    assert not np.array_equal(found, single)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_with_prompts_first_the_same_bits_are_computed(artifact: Artifact, kv_dtype: Any) -> None:
    config = SessionConfig(threads=2, slots=2, kv_dtype=kv_dtype)

    def logits(*, prompts_first: bool) -> list[np.ndarray[Any, Any]]:
        session = open_session(artifact, config, lambda _report: None, prompts_first=prompts_first)
        found = [session.prefill(0, IDS, 0, range(40)).copy()]
        return [*found, *(session.decode([step], [41 + step]).copy() for step in range(4))]

    for together, after in zip(logits(prompts_first=True), logits(prompts_first=False), strict=True):
        assert np.array_equal(together, after)


def test_answers_are_computed_by_the_first_graph_over_the_prompts_cache(
    artifact: Artifact, alone: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORT_GQA_DISABLE_FLASH_ATTENTION", "1")  # as above
    session, plain, other = (
        opened(artifact, kv_dtype="float32"),
        opened(artifact, kv_dtype="float32"),
        opened(alone),
    )
    other.prefill(0, IDS, 0)
    for layer in range(artifact.manifest.kv.layers):
        for kind in ("key", "value"):
            plain.cache.rows(layer, kind, 0, 1)[...] = other.cache.rows(layer, kind, 0, 1)
    session.prefill(0, IDS, 0)
    assert np.array_equal(session.decode([7], [41]), plain.decode([7], [41]))


def test_a_single_graph_is_the_first(
    artifact: Artifact, source: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    without = export_tiny(source, tmp_path / "without", **options, kv_dtype="float32")
    session = opened(artifact, kv_dtype="float32", single_graph=True)
    assert not session.capabilities.separate_prompts
    assert np.array_equal(
        session.prefill(0, IDS, 0, range(40)), opened(without).prefill(0, IDS, 0, range(40))
    )


def test_equal_weights_are_stored_once(artifact: Artifact) -> None:
    assert artifact.manifest.prompts is not None
    graph = onnx.load(artifact.folder / artifact.manifest.prompts.graph, load_external_data=False).graph
    where = {t.name: {e.key: e.value for e in t.external_data}.get("location") for t in graph.initializer}
    files = {where[name] for name in where if name.startswith("model.embed_tokens")}
    shares = artifact.manifest.recipe.precision == "int8"
    assert files == {"model.onnx.data" if shares else "prompts.onnx.data"}
    assert where["model.layers.0.self_attn.o_proj.weight"] == "prompts.onnx.data"


def test_the_same_export_gives_the_same_bytes(
    artifact: Artifact, source: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    own = prompts(transforms=options.get("transforms", ()))
    again = export_tiny(source, tmp_path / "again", prompts=own, **options)
    assert contents(again.folder) == contents(artifact.folder)
    without = export_tiny(source, tmp_path / "without", **options)
    assert without.manifest.fingerprint != artifact.manifest.fingerprint


def test_what_cannot_be_is_refused(source: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"target": "openvino"}, "--prefill-recipe with --target openvino"),
        ({"precision": "fp16"}, "computes in float32 and the other graph in float16"),
        ({"prompts": prompts(activations="static", rules=())}, "static without a rotation"),
    ):
        with pytest.raises(UsageError, match=message):
            export_tiny(source, tmp_path / "out", **{"prompts": prompts(), **options})
        assert not (tmp_path / "out").exists()


SPIKY = Rule(("*.mlp.down_proj",), activations="block", outliers="1", label="the rule")


def test_a_choice_for_prompts_takes_a_text_and_is_a_use_of_it(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog.\n" * 9)
    own = prompts(rules=(SPIKY,))
    options = ExportOptions(
        str(source), tmp_path / "a", precision="int8", kv_dtype="float32", prompts=own, calibration=None
    )
    for run in (lambda: export(options, silent), lambda: preview(options)):
        with pytest.raises(UsageError, match=r"the rule: spikiest chooses by .* add --calibration FILE"):
            run()
    made = export(replace(options, calibration=tmp_path / "text"), silent).artifact
    assert made.manifest.prompts is not None
    (rule,) = made.manifest.prompts.recipe.rules
    assert len(rule.modules) == 1


def test_static_scales_of_prompts_are_measured_where_there_is_a_text(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog.\n" * 9)
    own = prompts(rules=(Rule(("*.mlp.down_proj",), activations="static"),))
    options = ExportOptions(str(source), tmp_path / "a", precision="int8", kv_dtype="float32", prompts=own)
    with pytest.raises(
        UsageError, match=r"static of model.layers.0.mlp.down_proj: .* add --calibration FILE"
    ):
        export(options, silent)
    made = export(replace(options, calibration=tmp_path / "text"), silent).artifact
    graph = onnx.load(made.folder / "prompts.onnx", load_external_data=False).graph
    scales = {
        float(onnx.numpy_helper.to_array(tensor))
        for tensor in graph.initializer
        if tensor.name.endswith("/static_scale")
    }
    assert len(scales) == made.manifest.model.num_hidden_layers


def test_a_missing_file_is_told(artifact: Artifact, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(artifact.folder, tmp_path / "copy"))
    (folder / "prompts.onnx.data").unlink()
    with pytest.raises(ArtifactError, match=r"prompts\.onnx\.data is missing"):
        load_artifact(folder)


def test_a_runtime_that_goes_wrong_on_no_rows_is_asked_for_one(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chunk that is not a prompt's last no logits are wanted, and onnxruntime before 1.32 fails on
    none.
    """
    asked: dict[bool, list[int]] = {}
    found = {}
    for able in (True, False):
        monkeypatch.setattr(session_opening, "takes_no_rows", lambda runtime, able=able: able)
        session = opened(artifact)
        run, rows = session._prompts.run, asked.setdefault(able, [])
        monkeypatch.setattr(
            session._prompts, "run", lambda *of, run=run, rows=rows: rows.append(len(of[3])) or run(*of)
        )
        assert session.prefill(0, IDS[:20], 0, ()).shape == (0, 512)
        found[able] = session.prefill(0, IDS[20:], 20).copy()
    assert asked == {True: [0, 1], False: [1, 1]}
    np.testing.assert_array_equal(found[True], found[False])


def test_the_releases_that_take_no_rows() -> None:
    taken = {
        name: takes_no_rows(SimpleNamespace(__version__=name))
        for name in ("1.24.1", "1.31.1", "1.32.0", "2.0.0")
    }
    assert taken == {"1.24.1": False, "1.31.1": False, "1.32.0": True, "2.0.0": True}
