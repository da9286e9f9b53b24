"""Experts in blocks: the graph computes the model on the weights that the blocks leave, and routes as it
does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from llorch_export.adapter.choice import AdapterChoice
from llorch_export.calibration.measurements import BUNDLED_TEXT
from llorch_export.checkpoint.base import LazyTensor
from llorch_export.checkpoint.names import expected_tensors
from llorch_export.graph.decoder import build_decoder
from llorch_export.options import ExportOptions, Rule
from llorch_export.pipeline import export
from llorch_export.recipes.base import base_recipe
from llorch_export.recipes.file import load_recipe
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.fidelity.divergence import log_softmax
from llorch_serve.runtime.opening import open_session
from support.builders.adapters import Factors, write_adapter
from support.builders.arch_rows import HF
from support.builders.arch_rows_experts import QWEN2_MOE
from support.builders.checkpoints import Weights, of_family, tiny_llama_config, write_gguf, write_hf_folder
from support.builders.packed_checkpoints import write_gptq
from support.builders.tiny_exports import all_logits, export_tiny, open_tiny, random_ids, silent
from support.oracles.expert_stacks import Matrices, stacks
from support.oracles.stepwise import reference
from tolerances import FP32_LOGITS, KL_FP16, KL_LEVEL_4_INT8, QUANTISED_LOGITS_LEVEL_0

IDS: Final = random_ids(60)


def put_back(weights: Weights, stored: dict[str, Matrices]) -> None:
    """Put the values of stacks in the places of the experts' own weights."""
    for name, values in stored.items():
        prefix, _, kind = name.rpartition(".")
        for expert, matrix in enumerate(values):
            parts = {"down_proj": matrix}
            if kind == "gate_up_proj":
                parts = {"gate_proj": matrix[0::2], "up_proj": matrix[1::2]}
            for part, value in parts.items():
                own = f"{prefix}.{expert}.{part}.weight"
                assert np.abs(weights[own] - value).max() < 0.2 * np.abs(weights[own]).max()
                weights[own] = np.ascontiguousarray(value)


def divergence(expected: Matrices, found: Matrices) -> float:
    wanted, ours = log_softmax(expected), log_softmax(found)
    return float((np.exp(wanted) * (wanted - ours)).sum(axis=-1).mean())


@pytest.mark.reference
@pytest.mark.parametrize(
    ("row", "storage"),
    [
        ("mixtral", {"quantizer": "affine"}),
        ("mixtral", {"quantizer": "nearest", "block_size": 16}),
        ("qwen2_moe, one layer without", {"quantizer": "search", "scale_type": "float32"}),
        ("qwen3_moe", {"quantizer": "hqq"}),
    ],
)
def test_four_bits_compute_what_transformers_computes_on_their_values(
    tmp_path: Path, row: str, storage: dict[str, Any]
) -> None:
    source = write_hf_folder(tmp_path / "model", HF[row])
    rules = (Rule(("*.experts.*",), precision="int4", **storage),)
    artifact = export_tiny(source, tmp_path / "out", rules=rules, accuracy_level=0, kv_dtype="float32")
    values = write_hf_folder(tmp_path / "values", HF[row], edit=lambda w: put_back(w, stacks(artifact)))
    expected = reference(values, IDS)
    np.testing.assert_allclose(all_logits(artifact, IDS), expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)
    assert divergence(reference(source, IDS), expected) > 1e-4, "rounding must have done something"


@pytest.mark.reference
@pytest.mark.parametrize("row", ["mixtral", "qwen2_moe", "granitemoe"])
def test_eight_bits_are_near_what_transformers_computes_on_their_values(tmp_path: Path, row: str) -> None:
    source = write_hf_folder(tmp_path / "model", HF[row])
    rules = (Rule(("*.experts.*",), precision="int8"),)
    artifact = export_tiny(source, tmp_path / "out", rules=rules, kv_dtype="float32")
    values = write_hf_folder(tmp_path / "values", HF[row], edit=lambda w: put_back(w, stacks(artifact)))
    assert divergence(reference(values, IDS), all_logits(artifact, IDS)) < KL_LEVEL_4_INT8
    assert artifact.manifest.min_onnxruntime == "1.31"


@pytest.mark.reference
@pytest.mark.parametrize("storage", [{}, {"rules": (Rule(("*.experts.*",), precision="int4"),)}])
def test_half_precision_computes_the_model(tmp_path: Path, storage: dict[str, Any]) -> None:
    source = write_hf_folder(tmp_path / "model", HF["qwen2_moe"])
    artifact = export_tiny(source, tmp_path / "out", precision="fp16", **storage)
    found = divergence(reference(source, IDS), all_logits(artifact, IDS))
    assert found < (0.05 if storage else KL_FP16)


@pytest.mark.reference
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_of_equal_logits_the_higher_index_is_taken(tmp_path: Path, precision: str) -> None:
    """torch.topk says nothing of ties; here they go one way, so a model in which both ways are the same
    tells.
    """
    row = of_family("mixtral", num_local_experts=4, num_experts_per_tok=1)

    def tied(weights: Weights) -> None:
        for layer in (0, 1):
            weights[f"model.layers.{layer}.mlp.gate.weight"][0] = weights[
                f"model.layers.{layer}.mlp.gate.weight"
            ][1]

    def alike(weights: Weights) -> None:
        tied(weights)
        for name in [name for name in weights if ".experts.0." in name]:
            weights[name] = weights[name.replace(".experts.0.", ".experts.1.")]

    found, both, untied = (
        all_logits(
            export_tiny(
                write_hf_folder(tmp_path / f"model {index}", row, edit=edit),
                tmp_path / f"out {index}",
                precision="fp32",
                rules=(Rule(("*.experts.*",), precision="int4"),) if precision == "int4" else (),
            ),
            IDS,
        )
        for index, edit in enumerate((tied, alike, None))
    )
    np.testing.assert_array_equal(found, both)
    assert np.abs(found - untied).max() > 0.1


@pytest.mark.reference
@pytest.mark.parametrize("recipe", ["cpu", "int4-mixed", "int4-gptq"])
@pytest.mark.parametrize("row", ["mixtral", "qwen2_moe, one layer without"])
def test_recipes_stay_within_their_limits(tmp_path: Path, row: str, recipe: str) -> None:
    source = write_hf_folder(tmp_path / "model", HF[row])
    options = load_recipe(recipe).options(ExportOptions(str(source), tmp_path / "out"))
    artifact = export(options, silent).artifact
    found = divergence(reference(source, IDS), all_logits(artifact, IDS))
    assert 1e-6 < found < artifact.manifest.recipe.kl_limit
    assert artifact.manifest.int8_cache is not None
    over_int8 = open_tiny(artifact, kv_dtype="int8").prefill(1, IDS, 0, range(len(IDS)))
    assert divergence(all_logits(artifact, IDS), over_int8) < 0.05


@pytest.mark.parametrize(
    ("precision", "head", "told"),
    [
        ("int4", "int8", "without error feedback (affine in place of gptq)"),
        ("int8", "int8", "without error feedback (nearest in place of gptq)"),
        ("int8", "int4", ""),  # 8-bit blocks beside others of 4 are nearest anyway
    ],
)
def test_experts_that_do_without_error_feedback_are_told(
    tmp_path: Path, precision: str, head: str, told: str
) -> None:
    source = write_hf_folder(tmp_path / "model", HF["mixtral"])
    found = export(
        ExportOptions(
            str(source),
            tmp_path / "out",
            precision=precision,  # type: ignore[arg-type]
            head_precision=head,  # type: ignore[arg-type]
            quantizer="gptq",
            calibration=BUNDLED_TEXT,
        ),
        silent,
    )
    notices = [notice for notice in found.notices if "without error feedback" in notice]
    assert [told in notice for notice in notices] == ([True] if told else [])


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_of_a_gguf_file_are_carried_over(tmp_path: Path, kind: str) -> None:
    row = of_family("qwen2_moe", **{**QWEN2_MOE, "shared_expert_intermediate_size": 64})
    source = write_gguf(tmp_path / "m.gguf", row, weight_type=kind)
    artifact = export_tiny(source, tmp_path / "out", precision="source", kv_dtype="float32")
    assert len(stacks(artifact)) == 4
    whole = export_tiny(source, tmp_path / "whole")
    assert divergence(all_logits(whole, IDS), all_logits(artifact, IDS)) < KL_LEVEL_4_INT8


@pytest.mark.parametrize("order", [False, True])
def test_codes_of_packed_experts_are_carried_over_but_for_those_in_another_order(
    tmp_path: Path, order: bool
) -> None:
    source = write_gptq(tmp_path / "model", HF["qwen3_moe"], order=order).folder
    options = ExportOptions(str(source), tmp_path / "out", "source", kv_dtype="float32")
    found = export(options if order else replace(options, accuracy_level=0), silent)
    whole = all_logits(export_tiny(source, tmp_path / "whole"), IDS)
    logits = all_logits(found.artifact, IDS)
    assert any("quantised anew: int8, block 32" in notice for notice in found.notices) is order
    # A record by matrix would contradict what the layer's node holds.
    forms = found.artifact.manifest.source_forms
    assert isinstance(forms, tuple)
    named = [module for form in forms for module in form.modules]
    assert any(module.endswith(".o_proj") for module in named)
    assert not [module for module in named if ".experts." in module or module.endswith(".mlp.gate")]
    assert any("llorch inspect shows what experts and routers became" in n for n in found.notices)
    if not order:
        np.testing.assert_allclose(logits, whole, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)
    assert divergence(whole, logits) < 0.01


def test_experts_that_cannot_be_multiplied_as_asked_are_refused_with_a_way_that_works(tmp_path: Path) -> None:
    source = write_gptq(tmp_path / "model", HF["qwen3_moe"], bits=8).folder
    options = ExportOptions(str(source), tmp_path / "out", "source", kv_dtype="float32", accuracy_level=0)
    with pytest.raises(
        UsageError, match=r"multiplies 8-bit experts in int8 alone.*--precision fp32"
    ) as error:
        export(options, silent)
    assert "*.experts.*" not in str(error.value)  # no rule goes with precision source
    for way in ({"accuracy_level": None}, {"precision": "fp32", "accuracy_level": None}):
        export(replace(options, output=tmp_path / str(len(way)), **way), silent)


def test_a_gguf_file_of_before_2024_has_tensors_for_each_expert(tmp_path: Path) -> None:
    """llama.cpp called them ``ffn_gate.0`` then; the weights are those of a file of today."""
    today = write_gguf(tmp_path / "today.gguf", HF["mixtral"])
    own: dict[str, npt.NDArray[np.float32]] = {}

    def taken_out(weights: Weights) -> None:
        for name in [name for name in weights if ".experts." in name]:
            _, _, layer, _, _, expert, part, _ = name.split(".")
            own[f"blk.{layer}.ffn_{part.removesuffix('_proj')}.{expert}.weight"] = weights.pop(name)

    before = write_gguf(tmp_path / "before.gguf", HF["mixtral"], edit=taken_out, extra=own)
    assert "blk.1.ffn_down.3.weight" in own
    found = [all_logits(export_tiny(path, tmp_path / path.stem), IDS) for path in (today, before)]
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "portable"}, "several experts in a layer, and --target portable has no operator"),
        ({"interop": "genai", "precision": "int8"}, "--interop genai is made for models without them"),
        ({"precision": "int8", "accuracy_level": 0}, "multiplies 8-bit experts in int8 alone"),
        (
            {"precision": "int8", "rules": (Rule(("*.experts.1.*",), precision="int4"),)},
            "a layer's experts would be stored as int4 .* and int8 .*; one node reads them all",
        ),
        (
            {"precision": "int8", "rules": (Rule(("*.experts.*",), activations="row"),)},
            "is one of several experts, which take blocks",
        ),
        (
            {"precision": "int8", "rules": (Rule(("*.mlp.gate",), precision="int4"),)},
            "no module matches",
        ),
        ({"transforms": ("smooth",), "calibration": Path("text")}, "smooth, .*, has no effect"),
    ],
)
def test_what_experts_have_no_form_of_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    source = write_hf_folder(tmp_path / "model", HF["mixtral"])
    with pytest.raises(UsageError, match=message):
        export_tiny(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_blocks_that_divide_no_size_are_refused_and_whole_experts_are_not(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model", of_family("mixtral", intermediate_size=40))
    with pytest.raises(UsageError, match="experts from 64 to 40 channels cannot be stored in blocks"):
        export_tiny(source, tmp_path / "out", precision="int8")
    rules = (Rule(("*.experts.*",), precision="fp32"),)
    assert all_logits(export_tiny(source, tmp_path / "out", precision="int8", rules=rules), IDS).size


def test_a_session_does_not_promise_bits_that_neighbours_may_change(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model", HF["qwen3_moe"])
    artifact = export_tiny(source, tmp_path / "out")
    assert not open_tiny(artifact).capabilities.batch_invariant
    with pytest.raises(UsageError, match="each of its experts computes the rows"):
        open_session(artifact, SessionConfig(slots=2, batch_invariant=True), lambda report: None)


@pytest.mark.reference
def test_an_adapter_of_attention_is_merged_and_experts_are_none_of_its_linear_layers(tmp_path: Path) -> None:
    row = HF["mixtral"]
    source = write_hf_folder(tmp_path / "model", row)

    def of_attention(factors: Factors) -> None:
        for name in [name for name in factors if "self_attn" not in name]:
            del factors[name]

    modules = ["q_proj", "v_proj"]
    factors = write_adapter(
        tmp_path / "lora", tiny_llama_config(**row), edit=of_attention, target_modules=modules
    )

    def merged(weights: Weights) -> None:
        for name in [name for name in weights if name.endswith((".q_proj.weight", ".v_proj.weight"))]:
            module = name.removesuffix(".weight")
            weights[name] = weights[name] + 6 / 4 * factors[f"{module}.b"] @ factors[f"{module}.a"]

    artifact = export_tiny(source, tmp_path / "out", lora=(AdapterChoice(tmp_path / "lora"),))
    expected = reference(write_hf_folder(tmp_path / "merged", row, edit=merged), IDS)
    np.testing.assert_allclose(all_logits(artifact, IDS), expected, atol=FP32_LOGITS, rtol=0)
    write_adapter(tmp_path / "all", tiny_llama_config(**row), edit=of_attention, target_modules="all-linear")
    with pytest.raises(ArtifactError, match=r"lacks adapters for 4 modules: .*k_proj, .*o_proj"):
        export_tiny(source, tmp_path / "none", lora=(AdapterChoice(tmp_path / "all"),))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "experts.gate_up_proj",
            lambda w: w[:, :-1],
            r"gate_up_proj is \[4, 191, 64\], expected \[4, 192, 64\]",
        ),
        ("experts.gate_up_proj", lambda w: w[:3], r"gate_up_proj is \[3, 192, 64\], expected \[4, 192, 64\]"),
        ("experts.gate_up_proj", lambda w: w.reshape(-1, 64), r"gate_up_proj is \[768, 64\], expected"),
        ("experts.down_proj", lambda w: None, "lacks 1 of .* tensors that its config calls for: .*down_proj"),
        ("gate.weight", lambda w: w[:3], r"mlp.gate.weight is \[3, 64\], expected \[4, 64\]"),
    ],
)
def test_stacks_of_another_shape_are_refused(
    tmp_path: Path, name: str, change: Callable[[Matrices], Matrices | None], message: str
) -> None:
    source = write_hf_folder(tmp_path / "model", HF["mixtral"], stacked_experts=True)
    held = load_file(source / "model.safetensors")
    whole = f"model.layers.1.mlp.{name}"
    changed = change(held.pop(whole))
    if changed is not None:
        held[whole] = np.ascontiguousarray(changed)
    save_file(held, source / "model.safetensors")
    with pytest.raises(ArtifactError, match=message):
        export_tiny(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def zeros(rest: tuple[int, ...], start: int, stop: int) -> Matrices:
    return np.zeros((stop - start, *rest), np.float32)


def test_memory_holds_some_rows_of_an_expert(tmp_path: Path) -> None:
    """An expert of Mixtral has 704 MB in float32; the stack of them is planned, and read in chunks."""
    config = tiny_llama_config(
        **of_family("mixtral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, head_dim=64)
    )
    tensors = {
        name: LazyTensor(name, shape, "F32", functools.partial(zeros, shape[1:]))
        for name, shape in expected_tensors(config).items()
    }
    options = ExportOptions("model", tmp_path, "int8", kv_dtype="float32")
    graph = build_decoder(config, base_recipe(options), tensors, context_length=64)
    (job,) = (job for job in graph.jobs if job.tensors[0].name.endswith("gate_up_proj.weight"))
    assert job.tensors[0].nbytes == 8 * 2 * 14336 * 4096
    chunks = list(itertools.islice(job.chunks(), 3))
    assert all(array.nbytes <= 2**23 for chunk in chunks for array in chunk)
