"""Static scales and rules for activations: which layers get which form, with which scale, and what they
compute.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from llorch_export.inspect.modules import StoredModule, stored_modules
from llorch_export.options import ExportOptions, Rule
from llorch_export.pipeline import export
from llorch_export.preview import preview
from llorch_serve.artifact.folder import Artifact
from llorch_serve.errors import UsageError
from llorch_serve.fidelity.divergence import DivergenceSum
from support.builders.arch_rows import HF
from support.builders.checkpoints import Weights, write_hf_folder
from support.builders.tiny_exports import all_logits, export_tiny, open_tiny, random_ids, silent
from tolerances import KL_ROW_TINY

IDS = random_ids(100)
TEXT = "The quick brown fox jumps over the lazy dog while seventeen engineers measure latency.\n" * 4


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def forms(artifact: Artifact) -> dict[str, str]:
    """Return each linear layer's form: block, or the form of the codes it reads."""
    graph = onnx.load(artifact.graph_path, load_external_data=False).graph
    kinds = {
        "MatMulNBits": lambda node: "block",
        "MatMulIntegerToFloat": lambda node: node.input[0].rpartition("/")[2],
    }
    return {node.output[0]: kinds[node.op_type](node) for node in graph.node if node.op_type in kinds}


def static_scales(artifact: Artifact) -> dict[str, float]:
    graph = onnx.load(artifact.graph_path, load_external_data=False).graph
    return {
        tensor.name.removesuffix("/static_scale"): float(onnx.numpy_helper.to_array(tensor))
        for tensor in graph.initializer
        if tensor.name.endswith("/static_scale")
    }


def kl(reference: npt.NDArray[np.float32], model: npt.NDArray[np.float32]) -> float:
    total = DivergenceSum()
    total.add(reference, model)
    return total.result().kl


def test_after_a_rotation_norms_have_a_known_scale(source: Path, tmp_path: Path) -> None:
    artifact = export_tiny(
        source, tmp_path / "a", precision="int8", activations="static", transforms=("rotate",)
    )
    layers = {
        "self_attn.qkv_proj": "static_codes",
        "self_attn.o_proj": "block",
        "mlp.gate_proj": "static_codes",
        "mlp.up_proj": "static_codes",
        "mlp.down_proj": "block",
    }
    expected = {f"model.layers.{layer}.{name}": form for layer in (0, 1) for name, form in layers.items()}
    assert forms(artifact) == expected | {"logits": "block"}
    assert set(static_scales(artifact)) == {
        f"model.layers.{layer}.{norm}"
        for layer in (0, 1)
        for norm in ("input_layernorm", "post_attention_layernorm")
    }
    assert set(static_scales(artifact).values()) == {float(np.float32(4 / 127))}
    fp32 = all_logits(export_tiny(source, tmp_path / "fp32"), IDS)
    assert 1e-6 < kl(fp32, all_logits(artifact, IDS)) < KL_ROW_TINY


def test_a_text_settles_scales_at_the_largest_value_it_gives(
    source: Path, tmp_path: Path, text: Path
) -> None:
    options: dict[str, Any] = {"precision": "int8", "activations": "static", "transforms": ("rotate",)}
    artifact = export_tiny(source, tmp_path / "a", calibration=text, **options)
    scales = static_scales(artifact)
    assert len(scales) == 4
    assert len(set(scales.values())) == 4
    assert all(1 < 127 * scale < 8 for scale in scales.values())  # of values with a root mean square of 1
    assert artifact.manifest.recipe.calibration is not None
    fp32 = all_logits(export_tiny(source, tmp_path / "fp32"), IDS)
    assert kl(fp32, all_logits(artifact, IDS)) < KL_ROW_TINY


def test_a_static_row_is_the_same_alone_and_among_others(source: Path, tmp_path: Path) -> None:
    artifact = export_tiny(
        source, tmp_path / "a", precision="int8", activations="static", transforms=("rotate",)
    )
    session = open_tiny(artifact, slots=8)
    for slot in range(8):
        session.prefill(slot, random_ids(4 + 2 * slot, seed=slot), 0)
    lengths = [5 + 2 * slot for slot in range(8)]
    together = session.decode(IDS[:8], lengths).copy()
    for count in (1, 3, 6):
        np.testing.assert_array_equal(session.decode(IDS[:count], lengths[:count]), together[:count])


def test_static_scales_that_nothing_settles_are_refused(source: Path, tmp_path: Path, text: Path) -> None:
    options = ExportOptions(source=str(source), output=tmp_path / "a", activations="static")
    for run in (lambda: export(options, silent), lambda: preview(options)):
        with pytest.raises(
            UsageError, match=r"--activations static without a rotation .* add --transform rotate"
        ):
            run()
    rule = Rule(("*.down_proj",), activations="static")
    for transforms in ((), ("rotate",)):
        ruled = ExportOptions(source=str(source), output=tmp_path / "a", rules=(rule,), transforms=transforms)
        with pytest.raises(
            UsageError, match=r"static of model.layers.0.mlp.down_proj: .* add --calibration FILE"
        ):
            export(ruled, silent)
    artifact = export_tiny(source, tmp_path / "b", precision="int8", rules=(rule,), calibration=text)
    assert [form for name, form in forms(artifact).items() if name.endswith("down_proj")] == [
        "static_codes"
    ] * 2


def test_rules_choose_by_what_a_text_shows(tmp_path: Path, text: Path) -> None:
    def edit(weights: Weights) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3] *= 100  # one channel far above all others

    source = write_hf_folder(tmp_path / "model", edit=edit)
    rules = (
        Rule(("*.down_proj",), activations="static"),
        Rule(("*.down_proj",), activations="block", outliers="1/2", label="the rule"),
    )
    artifact = export_tiny(source, tmp_path / "a", precision="int8", rules=rules, calibration=text)
    found = forms(artifact)
    assert found["model.layers.0.mlp.down_proj"] == "static_codes"
    assert found["model.layers.1.mlp.down_proj"] == "block"
    other = (rules[0], dataclasses.replace(rules[1], outliers="1"))  # of two layers, the same in other words
    again = export_tiny(source, tmp_path / "b", precision="int8", rules=other, calibration=text)
    assert again.manifest.recipe == artifact.manifest.recipe
    assert again.manifest.fingerprint == artifact.manifest.fingerprint
    both = (rules[0], dataclasses.replace(rules[1], outliers="2"))
    more = export_tiny(source, tmp_path / "more", precision="int8", rules=both, calibration=text)
    assert more.manifest.fingerprint != artifact.manifest.fingerprint
    # Before anything is measured both stand for the first layer's, but this one chooses from it alone.
    first = (rules[0], dataclasses.replace(other[1], layers=("first 1",)))
    options: dict[str, Any] = {"precision": "int8", "rules": first, "calibration": text, "if_changed": True}
    narrower = export_tiny(source, tmp_path / "b", **options)
    assert forms(narrower)["model.layers.0.mlp.down_proj"] == "block"
    without = ExportOptions(source=str(source), output=tmp_path / "c", rules=(rules[1],))
    for run in (lambda: export(without, silent), lambda: preview(without)):
        with pytest.raises(UsageError, match=r"the rule: spikiest chooses by .* add --calibration FILE"):
            run()


@pytest.mark.parametrize("scaling", [1.0, 4.0])
def test_a_head_s_static_scale_is_what_a_text_gives_it(tmp_path: Path, text: Path, scaling: float) -> None:
    """Logits that a family scales are scaled before the head, so its input is smaller by that."""
    config = HF["granite"] | {"logits_scaling": scaling}
    source = write_hf_folder(tmp_path / "model", config | {"tie_word_embeddings": False})
    rule = Rule(("lm_head",), activations="static")
    options: dict[str, Any] = {"precision": "int8", "rules": (rule,), "transforms": ("rotate",)}
    with pytest.raises(UsageError, match=r"static of lm_head: .* add --calibration FILE"):
        export_tiny(source, tmp_path / "a", **options)
    artifact = export_tiny(source, tmp_path / "a", calibration=text, **options)
    (scale,) = static_scales(artifact).values()
    assert 1 < 127 * scale * scaling < 8  # as of every norm's output, once the factor is out
    fp32 = all_logits(export_tiny(source, tmp_path / "fp32"), IDS)
    assert kl(fp32, all_logits(artifact, IDS)) < KL_ROW_TINY


def test_a_text_for_a_choice_alone_has_a_use(source: Path, tmp_path: Path, text: Path) -> None:
    rule = Rule(("*.down_proj",), precision="fp32", outliers="1")
    options: dict[str, Any] = {"precision": "int8", "calibration": text, "kv_dtype": "float32"}
    assert export_tiny(source, tmp_path / "a", rules=(rule,), **options).manifest.recipe.rules
    with pytest.raises(UsageError, match="has no effect on this export"):
        export_tiny(source, tmp_path / "b", **options)


def test_rules_choose_forms_module_by_module(source: Path, tmp_path: Path) -> None:
    rules = (
        Rule(("model.layers.1.mlp.down_proj",), activations="block"),
        Rule(("model.layers.0.self_attn.q_proj",), activations="block", block_size=64),
        Rule(("model.layers.1.mlp.up_proj",), precision="fp32"),
    )
    artifact = export_tiny(source, tmp_path / "a", precision="int8", activations="row", rules=rules)
    found = forms(artifact)
    assert {name for name, form in found.items() if form == "block"} == {
        "model.layers.1.mlp.down_proj",
        "model.layers.0.self_attn.q_proj",
        "logits",
    }
    assert found["model.layers.0.self_attn.k_proj"] == found["model.layers.0.mlp.down_proj"] == "row_codes"
    assert "model.layers.1.mlp.up_proj" not in found
    fp32 = all_logits(export_tiny(source, tmp_path / "fp32"), IDS)
    assert kl(fp32, all_logits(artifact, IDS)) < KL_ROW_TINY


def test_rows_by_rule_stand_beside_other_precisions(source: Path, tmp_path: Path) -> None:
    rule = Rule(("*.mlp.*",), precision="int8", activations="row")
    artifact = export_tiny(source, tmp_path / "a", precision="int4", rules=(rule,))
    assert {name.split(".")[3] for name, form in forms(artifact).items() if form == "row_codes"} == {"mlp"}
    (entry,) = artifact.manifest.recipe.rules
    assert (entry.precision, entry.block_size, entry.activations) == ("int8", None, "row")


def test_a_listing_has_layers_in_whole_bytes(source: Path, tmp_path: Path) -> None:
    rule = Rule(("model.layers.1.mlp.down_proj",), activations="block")
    artifact = export_tiny(source, tmp_path / "a", precision="int8", activations="row", rules=(rule,))
    model = onnx.load(artifact.graph_path, load_external_data=False)
    found = {module.name: module for module in stored_modules(model)}
    inputs = artifact.manifest.model.intermediate_size
    assert found["model.layers.0.mlp.down_proj"] == StoredModule(
        "model.layers.0.mlp.down_proj", "int8", None, False, 8 + 32 / inputs
    )
    assert found["model.layers.1.mlp.down_proj"].block_size == 32
    linear = ("MatMulNBits", "MatMulIntegerToFloat", "GatherBlockQuantized")
    assert len(found) == sum(node.op_type in linear for node in model.graph.node)


def test_static_scales_stand_beside_error_feedback(source: Path, tmp_path: Path, text: Path) -> None:
    rules = (
        Rule(("*.up_proj",), precision="int4", quantizer="gptq"),
        Rule(("*.down_proj",), activations="static"),
    )
    options = ExportOptions(source=str(source), output=tmp_path / "a", rules=rules)
    with pytest.raises(UsageError, match="--quantizer gptq need figures measured on a text"):
        preview(options)
    artifact = export_tiny(source, tmp_path / "a", precision="int8", rules=rules, calibration=text)
    found = forms(artifact)
    assert found["model.layers.0.mlp.down_proj"] == "static_codes"
    assert found["model.layers.0.mlp.up_proj"] == "block"


def test_a_text_that_rules_leave_without_use_is_refused(source: Path, tmp_path: Path, text: Path) -> None:
    rule = Rule(("*.mlp.*",), activations="row")
    options = ExportOptions(
        source=str(source), output=tmp_path / "a", rules=(rule,), calibration=text, kv_dtype="float32"
    )
    for run in (lambda: export(options, silent), lambda: preview(options)):
        with pytest.raises(UsageError, match="has no effect on this export"):
            run()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            Rule(("*.mlp.*",), activations="row", block_size=64),
            "block_size has no effect with activations row",
        ),
        (
            Rule(("*.mlp.*",), activations="row", quantizer="gptq"),
            "quantizer has no effect with activations row",
        ),
        (
            Rule(("*.mlp.*",), precision="int4", activations="row"),
            "activations row is for int8, and model.layers.0.mlp",
        ),
        (
            Rule(("model.embed_tokens",), activations="row"),
            "model.embed_tokens is looked up, which takes blocks$",
        ),
    ],
)
def test_rules_that_cannot_be_are_refused(source: Path, tmp_path: Path, rule: Rule, message: str) -> None:
    options = ExportOptions(source=str(source), output=tmp_path / "a", rules=(rule,))
    with pytest.raises(UsageError, match=message):
        preview(options)


def test_a_tied_head_has_whole_bytes_where_a_rotation_unties_it(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model", {"tie_word_embeddings": True})
    rule = Rule(("lm_head",), activations="row")
    tied = ExportOptions(source=str(source), output=tmp_path / "a", rules=(rule,))
    for run in (lambda: export(tied, silent), lambda: preview(tied)):
        with pytest.raises(
            UsageError, match=r"this model's head is the same table; .* \(--transform rotate\)"
        ):
            run()
    artifact = export_tiny(
        source, tmp_path / "b", precision="int8", rules=(rule,), transforms=("rotate",), kv_dtype="float32"
    )
    assert {name for name, form in forms(artifact).items() if form == "row_codes"} == {"logits"}
    fp32 = all_logits(export_tiny(source, tmp_path / "fp32"), IDS)
    assert 1e-6 < kl(fp32, all_logits(artifact, IDS)) < KL_ROW_TINY


@pytest.mark.parametrize("rotated", [False, True])
def test_a_preview_has_the_size_of_the_export(tmp_path: Path, rotated: bool) -> None:
    source = write_hf_folder(tmp_path / "model", {"tie_word_embeddings": True})
    options = ExportOptions(
        source=str(source),
        output=tmp_path / "a",
        activations="static" if rotated else "row",
        transforms=("rotate",) if rotated else (),
        rules=(Rule(("model.embed_tokens",), precision="fp32"),),
    )
    expected = preview(options)["data_bytes"]
    artifact = export(options, silent).artifact
    assert (artifact.folder / "model.onnx.data").stat().st_size == expected
    heads = [
        node.op_type
        for node in onnx.load(artifact.graph_path, load_external_data=False).graph.node
        if "logits" in node.output
    ]
    assert heads == (["MatMulNBits"] if rotated else ["Gemm"])  # a rotation makes two tables of one
