"""The table of targets: every graph keeps to its row, every choice beyond a row is refused with what the row
takes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest

from llorch_export.formats import targets
from llorch_export.formats.precisions import target_precisions
from llorch_export.formats.targets import TARGETS, AttentionForm, BlockForm
from llorch_export.graph import check
from llorch_export.graph.check import check_operators
from llorch_export.inspect.modules import StoredModule, stored_modules
from llorch_export.interop.genai import GENAI_GRAPH
from llorch_export.options import ExportOptions, Rule
from llorch_export.recipes.base import base_recipe
from llorch_serve.artifact.manifest import Interop, Precision, Target
from llorch_serve.errors import ArtifactError, LlorchError, ProviderError, UsageError
from llorch_serve.providers import CPU, check_target
from support.builders import packed_hqq, packed_modelopt
from support.builders.arch_rows import HF
from support.builders.checkpoints import write_hf_folder
from support.builders.packed_folders import write_packed
from support.builders.tiny_exports import export_tiny, open_tiny

FAMILIES = [
    "heads of 24",
    "qwen3, window and yarn",
    "smollm3, biases, tied by default",
    "granite",
    "phi3, half rotated",
    "gemma2, tied",
    "gemma3, exact GELU",
    "nemotron",
    "apertus",
]
PACKED: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
NVFP4 = (packed_modelopt.nvfp4, packed_modelopt.settings("NVFP4"))
HQQ_3_BITS = (packed_hqq.matrix(3, 32, whole=False), packed_hqq.SETTINGS)
FLOATS = {"float32": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "model")


def load(folder: Path, name: str = "model.onnx") -> onnx.ModelProto:
    return onnx.load(folder / name, load_external_data=False)


def operators(model: onnx.ModelProto) -> set[str]:
    return {f"{n.domain}:{n.op_type}" if n.domain else n.op_type for n in model.graph.node}


def looks_up_odd_zero_points(model: onnx.ModelProto) -> bool:
    """Tell whether a table of 64 inputs has 4 bits and an odd number of zero points a row."""
    found = [
        node for node in model.graph.node if node.op_type == "GatherBlockQuantized" and len(node.input) == 4
    ]
    settings = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in found]
    return any(one["bits"] == 4 and 64 // one["block_size"] % 2 for one in settings)


def recipes(target: Target) -> list[dict[str, Any]]:
    """Return every pair of precisions that go together on a target, but for those that need a GGUF file, and
    layers in bytes.
    """
    row = TARGETS[target]
    plain = target_precisions(row, ())
    found: list[dict[str, Any]] = (
        [{"precision": "int8", "activations": form} for form in ("row", "quarters")]
        if row.per_channel_int8
        else []
    )
    for precision in target_precisions(row, row.linear_bits):
        heads: set[Precision | None] = {None, *target_precisions(row, row.table_bits)}
        for head in heads:
            if "source" in (precision, head) or (precision in plain and head in plain and head != precision):
                continue
            found.append({"precision": precision, **({"head_precision": head} if head else {})})
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_every_recipe_of_a_target_gives_a_graph_of_its_row(
    tmp_path: Path, model: Path, target: Target
) -> None:
    row, seen = TARGETS[target], set()
    for index, options in enumerate(recipes(target)):
        artifact = export_tiny(model, tmp_path / str(index), target=target, **options)
        manifest, proto = artifact.manifest, load(artifact.folder)
        seen |= operators(proto)
        assert operators(proto) <= row.operators
        assert {e.domain: e.version for e in proto.opset_import}[""] == row.opset
        assert proto.ir_version == row.ir_version
        assert manifest.target == target
        assert manifest.min_onnxruntime == (
            "1.27" if looks_up_odd_zero_points(proto) else row.min_onnxruntime
        )
        assert manifest.checked_on == row.checked_on
        assert manifest.kv.dtype in row.compute_types
        assert [value.name for value in proto.graph.input] == [spec.name for spec in manifest.inputs]
    for family in FAMILIES:
        source = write_hf_folder(tmp_path / f"{family}-model", HF[family])
        precision = target_precisions(row, ())[0]
        # The one target whose artifacts may have a graph for another runtime.
        interop: Interop | None = "genai" if target == "cpu" else None
        folder = export_tiny(
            source, tmp_path / family, target=target, precision=precision, interop=interop
        ).folder
        seen |= operators(load(folder))
        if interop is not None:
            seen |= operators(load(folder, GENAI_GRAPH))
    for precision in ("fp32", "int8") if row.experts else ():
        source = write_hf_folder(tmp_path / f"{precision}-experts", HF["qwen2_moe"])
        folder = export_tiny(source, tmp_path / f"{precision}-of-experts", precision=precision).folder
        seen |= operators(load(folder))
    for algorithm, maker in {"nvfp4": NVFP4, "hqq": HQQ_3_BITS}.items() if row.folds_constants else ():
        folder = write_packed(tmp_path / f"{algorithm}-model", PACKED, *maker, skip=("lm_head",)).folder
        artifact = export_tiny(folder, tmp_path / algorithm, precision="source")
        seen |= operators(load(artifact.folder))
    if "ReduceL2" in row.operators:
        pooled = export_tiny(model, tmp_path / "pooled", target=target, embed="mean")
        seen |= operators(load(pooled.folder))
    # An operator that no graph holds is a claim that nothing has checked; some appear only where rows are
    # padded.
    assert row.operators - seen <= {"Slice", "RotaryEmbedding"}


@pytest.mark.parametrize("target", TARGETS)
def test_an_operator_outside_the_row_stops_the_export_before_anything_is_written(
    tmp_path: Path, model: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = TARGETS[target]
    narrowed = {**TARGETS, target: replace(row, operators=row.operators - {"Mul"})}
    monkeypatch.setattr(check, "TARGETS", narrowed)
    output = tmp_path / "parent" / "out"
    with pytest.raises(LlorchError, match=rf"internal error: the graph for target {target} holds Mul,"):
        export_tiny(model, output, target=target, precision=target_precisions(row, ())[0])
    assert not output.parent.exists()


def test_a_foreign_operator_and_another_opset_are_named() -> None:
    node = onnx.helper.make_node("GroupQueryAttention", ["a"], ["b"], domain="com.microsoft")
    graph = onnx.helper.make_graph([node], "g", [], [])
    strange = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)])
    with pytest.raises(LlorchError, match=r"holds com\.microsoft:GroupQueryAttention, which"):
        check_operators(strange, "portable")
    del graph.node[:]
    old = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    with pytest.raises(LlorchError, match="is of opset 21, not 24"):
        check_operators(old, "portable")


@pytest.mark.parametrize("target", ["cuda", "webgpu"])
def test_gpus_with_the_cpus_operators_get_the_cpus_graph(tmp_path: Path, model: Path, target: Target) -> None:
    """So what is shown of the CPU's half-precision graph holds for theirs."""
    for precision in ("fp16", "int8", "int4"):
        theirs = export_tiny(
            model, tmp_path / precision, target=target, precision=precision, **half(precision)
        )
        ours = export_tiny(model, tmp_path / f"{precision}-cpu", precision=precision, **half(precision))
        for name in ("model.onnx", "model.onnx.data"):
            assert (theirs.folder / name).read_bytes() == (ours.folder / name).read_bytes()
        assert theirs.manifest.fingerprint != ours.manifest.fingerprint


def half(precision: str) -> dict[str, Any]:
    return {} if precision == "fp16" else {"compute_type": "float16"}


def test_portable_has_no_operator_of_another_domain() -> None:
    for target in ("portable", "coreml"):
        assert not any(":" in name for name in TARGETS[target].operators)


def test_fixed_shapes_are_fixed_flat_and_alike_in_both_graphs(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model", HF["qwen3, window and yarn"])
    artifact = export_tiny(source, tmp_path / "out", target="coreml", precision="fp16", max_context=40)
    fixed = artifact.manifest.fixed_shapes
    assert fixed is not None
    assert fixed.prefill_tokens == 40
    graphs = [load(artifact.folder), load(artifact.folder, fixed.prefill_graph)]
    for proto in graphs:
        inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True)
        values = [*inferred.graph.input, *inferred.graph.output, *inferred.graph.value_info]
        assert len(values) > 100
        for value in values:
            dims = value.type.tensor_type.shape.dim
            assert len(dims) <= 5, value.name
            assert all(d.dim_value > 0 for d in dims), value.name
    weights = [
        {t.name: [(e.key, e.value) for e in t.external_data] for t in p.graph.initializer if t.external_data}
        for p in graphs
    ]
    assert weights[0] == weights[1]
    assert [v.name for v in graphs[0].graph.input] == [v.name for v in graphs[1].graph.input]


REFUSED: list[tuple[Target, dict[str, Any], str]] = [
    ("coreml", {"precision": "int4"}, "--precision is int4; --target coreml takes fp16, fp32"),
    ("coreml", {"precision": "bf16"}, "--precision is bf16; --target coreml takes fp16, fp32"),
    ("directml", {"precision": "bf16"}, "--precision is bf16; --target directml takes fp16, fp32, int4"),
    ("directml", {"precision": "int8"}, "--precision is int8; --target directml takes fp16, fp32, int4"),
    (
        "directml",
        {"precision": "int4", "head_precision": "int8"},
        "--head-precision is int8; --target directml takes fp16, fp32",
    ),
    (
        "portable",
        {"precision": "source"},
        "--precision is source; --target portable takes fp32, fp16, int8, int4",
    ),
    (
        "portable",
        {"precision": "int4", "head_precision": "int4"},
        "--head-precision is int4; --target portable takes fp32, fp16, int8",
    ),
    (
        "portable",
        {"precision": "int8", "accuracy_level": 0},
        "--accuracy-level 0 has no effect at --target portable",
    ),
    ("cuda", {"precision": "fp32"}, "--precision is fp32; --target cuda takes fp16, bf16, int8, int4"),
    ("cuda", {"precision": "source"}, "--precision is source; --target cuda takes fp16, bf16, int8, int4"),
    (
        "cuda",
        {"precision": "int8", "compute_type": "float32"},
        "--compute-type is float32; --target cuda computes in float16 or bfloat16",
    ),
    ("portable", {"interop": "genai"}, "--interop genai with --target portable: "),
]


@pytest.mark.parametrize(("target", "options", "message"), REFUSED)
def test_what_a_target_cannot_have_is_refused_with_what_it_can(
    target: Target, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        base_recipe(ExportOptions(source="model", output=Path(), target=target, **options))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "rule", "message"),
    [
        (
            "portable",
            Rule(("model.embed_tokens", "lm_head"), precision="int4"),
            "a rule stores model.embed_tokens at int4; --target portable takes fp32, fp16, int8 there",
        ),
        (
            "directml",
            Rule(("*.down_proj",), precision="int8"),
            "a rule stores model.layers.0.mlp.down_proj at int8; --target directml takes fp16, fp32, int4 "
            "there",
        ),
    ],
)
def test_a_rule_beyond_the_target_is_refused_with_the_module_it_means(
    tmp_path: Path, model: Path, target: Target, rule: Rule, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        export_tiny(model, tmp_path / "out", target=target, precision="int4", rules=(rule,))
    assert str(caught.value) == message
    assert not (tmp_path / "out").exists()


def test_inspect_says_how_matrices_in_dequantised_form_are_stored(tmp_path: Path, model: Path) -> None:
    """The table by rows and the head beside it; 8 bits with a float32 scale for 32 weights are 9 bits a
    weight.
    """
    rules = (Rule(("*.down_proj",), precision="int4", block_size=64, scale_type="bfloat16"),)
    folder = export_tiny(model, tmp_path / "out", target="portable", precision="int8", rules=rules).folder
    found = {module.name: module for module in stored_modules(load(folder))}
    for name in ("model.embed_tokens", "lm_head", "model.layers.0.self_attn.qkv_proj"):
        assert found[name] == StoredModule(name, "int8", 32, False, 9)
    down = found["model.layers.1.mlp.down_proj"]
    assert (down.precision, down.block_size, down.zero_points) == ("int4", 64, True)


def test_defaults_follow_the_target() -> None:
    def recipe(target: Target, **options: Any) -> Any:
        return base_recipe(ExportOptions(source="model", output=Path(), target=target, **options))

    assert recipe("cuda").compute_type == "float16"
    assert recipe("portable").compute_type == "float32"
    assert recipe("portable").accuracy_level is None
    assert recipe("directml", precision="int4").head_precision == "fp16"
    assert recipe("directml", precision="int4", compute_type="float32").head_precision == "fp32"
    for target, row in TARGETS.items():
        assert recipe(target, precision=row.precision).precision == row.precision


def test_what_a_provider_does_not_run_is_refused_with_what_does() -> None:
    with pytest.raises(
        ProviderError,
        match=r"is for target coreml, and OpenVINOExecutionProvider runs openvino; .* with --provider cpu or "
        r"coreml$",
    ):
        check_target("coreml", "OpenVINOExecutionProvider")
    for target in TARGETS:
        check_target(target, CPU)


def test_an_input_that_no_session_fills_is_refused_by_name(tmp_path: Path, model: Path) -> None:
    artifact = export_tiny(model, tmp_path / "out", target="coreml", precision="fp32")
    claimed = msgspec.structs.replace(artifact.manifest, target="portable")
    with pytest.raises(ArtifactError, match="has the inputs attention_bias, position_ids, which"):
        open_tiny(msgspec.structs.replace(artifact, manifest=claimed))


def test_forms_that_need_each_other_are_together() -> None:
    for target, row in TARGETS.items():
        assert row.fixed_shapes == (row.attention is AttentionForm.PRIMITIVE), target
        assert (row.blocks is None) == (not row.linear_bits), target
        assert row.carries_blocks <= (row.blocks is BlockForm.NBITS), target
        assert "float32" in row.compute_types or not row.carries_blocks, target
        assert set(row.table_bits) <= set(row.linear_bits), target
        assert targets.CONTRIB in "".join(row.operators) or not (row.fused_silu or row.fused_skip_norm)
