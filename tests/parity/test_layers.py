"""``verify --layers`` passes every model it should, and names the very stage whose weight was changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from llorch_export.adapter.choice import AdapterChoice
from llorch_export.verify.layers.stages import Kind
from llorch_export.verify.layers.verify import LayerReport, verify_layers
from llorch_serve.errors import UsageError
from support.builders.adapters import write_adapter
from support.builders.checkpoints import tiny_llama_config, write_gguf, write_hf_folder
from support.builders.tiny_exports import contents, export_tiny, silent

pytestmark = pytest.mark.reference

KINDS = set(Kind) - {Kind.LLAMA_CPP, Kind.ROUTER, Kind.EXPERTS}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("layers") / "model")


def check(artifact: Path, source: Path) -> LayerReport:
    return verify_layers(artifact, str(source), silent)


def damage(artifact: Path, initializer: str, factor: float = 1.0, *, one: float = 0.0) -> None:
    """Multiply an initialiser in the data file, or add ``one`` to a single element of it."""
    model = onnx.load(artifact / "model.onnx", load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.name == initializer)
    place = {entry.key: entry.value for entry in tensor.external_data}
    data = np.memmap(
        artifact / place["location"], np.float32, "r+", int(place["offset"]), (int(np.prod(tensor.dims)),)
    )
    data *= np.float32(factor)
    data[len(data) // 2] += np.float32(one)
    data.flush()


def test_an_fp32_artifact_passes_at_every_stage(tmp_path: Path, source: Path) -> None:
    export_tiny(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    found = check(tmp_path / "out", source)
    assert found.passed
    assert found.first_departing is None
    assert {stage.kind for stage in found.stages} == KINDS
    # 2 layers: input and post-attention norm; packed QKV and V; K and Q; gate, up, silu, product; o and down.
    expected = {Kind.NORM: 4, Kind.QKV: 4, Kind.ROPE: 4, Kind.SWIGLU: 8, Kind.PROJECTION: 4, Kind.BLOCK: 2}
    for kind in KINDS:
        stages = [stage for stage in found.stages if stage.kind is kind]
        per_layer = 2 if kind in (Kind.SCORES, Kind.ATTENTION, Kind.RESIDUAL) else 1
        assert len(stages) == expected.get(kind, per_layer), kind
        if kind in expected:
            assert {stage.layer for stage in stages} == {0, 1}
    recomputed = [stage.name for stage in found.stages if stage.source == "recomputed"]
    assert recomputed == [*(f"model.layers.{i}.self_attn.heads/query" for i in (0, 1)), "softmax"]
    assert all(name.startswith("wanted.") for name in found.not_compared)
    assert (found.prompt_tokens, found.greedy_tokens, found.same_source) == (64, 32, True)
    assert found.observer_effect < 1e-4
    assert contents(tmp_path / "out") == before


P = "model.layers.1"


@pytest.mark.parametrize(
    ("initializer", "stage", "kind"),
    [
        (f"{P}.mlp.down_proj.weight", f"{P}.mlp.down_proj", Kind.PROJECTION),
        (f"{P}.mlp.gate_proj.weight", f"{P}.mlp.gate_proj", Kind.SWIGLU),
        (f"{P}.self_attn.qkv_proj.weight", f"{P}.self_attn.qkv_proj", Kind.QKV),
        (f"{P}.self_attn.o_proj.weight", f"{P}.self_attn.o_proj", Kind.PROJECTION),
        (f"{P}.post_attention_layernorm.weight", f"{P}.post_attention_layernorm", Kind.NORM),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm", Kind.NORM),
        ("model.norm.weight", "model.norm", Kind.FINAL_NORM),
        ("lm_head.weight", "logits", Kind.LOGITS),
    ],
)
def test_one_changed_number_names_its_stage(
    tmp_path: Path, source: Path, initializer: str, stage: str, kind: Kind
) -> None:
    export_tiny(source, tmp_path / "out")
    damage(tmp_path / "out", initializer, one=0.5)
    found = check(tmp_path / "out", source)
    assert not found.passed
    assert found.first_departing is not None
    assert (found.first_departing.name, found.first_departing.kind) == (stage, kind)
    assert found.same_source


@pytest.mark.parametrize("table", ["rotary.cos", "rotary.sin"])
def test_a_wrong_rotary_table_is_seen_in_the_keys_and_in_the_queries(
    tmp_path: Path, source: Path, table: str
) -> None:
    export_tiny(source, tmp_path / "out")
    damage(tmp_path / "out", table, 1.01)
    found = check(tmp_path / "out", source)
    departing = [stage.name for stage in found.stages if not stage.passed]
    assert departing[:2] == ["present.0.key", "model.layers.0.self_attn.heads/query"]
    assert found.first_departing is not None
    assert found.first_departing.kind is Kind.ROPE


def test_a_wrong_embedding_departs_at_once(tmp_path: Path, source: Path) -> None:
    export_tiny(source, tmp_path / "out")
    damage(tmp_path / "out", "model.embed_tokens.weight", 1.001)
    found = check(tmp_path / "out", source)
    assert found.first_departing is not None
    assert found.first_departing.name == "embedding"


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_artifacts_pass_their_tolerance_with_figures(
    tmp_path: Path, source: Path, precision: str
) -> None:
    export_tiny(source, tmp_path / "out", precision=precision)
    found = check(tmp_path / "out", source)
    assert found.passed
    inner = [stage for stage in found.stages if stage.cosine is not None]
    assert all(0 < stage.distance < 1 and 0.9 < stage.cosine < 1 for stage in inner)  # type: ignore[operator]
    softmax = next(stage for stage in found.stages if stage.kind is Kind.SOFTMAX)
    assert 1e-6 < softmax.distance < found.recipe.kl_limit


@pytest.mark.parametrize(
    ("initializer", "stage"),
    [
        (f"{P}.mlp.down_proj.scales", f"{P}.mlp.down_proj"),
        (f"{P}.self_attn.qkv_proj.scales", f"{P}.self_attn.qkv_proj"),
        ("model.norm.weight", "model.norm"),
    ],
)
def test_a_wrong_scale_in_int8_names_its_stage(
    tmp_path: Path, source: Path, initializer: str, stage: str
) -> None:
    export_tiny(source, tmp_path / "out", precision="int8")
    damage(tmp_path / "out", initializer, 1.5)
    found = check(tmp_path / "out", source)
    assert found.first_departing is not None
    assert found.first_departing.name == stage


def test_a_nan_departs_where_it_arises(tmp_path: Path, source: Path) -> None:
    export_tiny(source, tmp_path / "out")
    damage(tmp_path / "out", f"{P}.mlp.up_proj.weight", one=np.nan)
    found = check(tmp_path / "out", source)
    assert found.first_departing is not None
    assert found.first_departing.name == f"{P}.mlp.up_proj"


def test_an_adapter_is_part_of_the_reference(tmp_path: Path, source: Path) -> None:
    """Without it the first projection that it changes departs."""
    adapter = tmp_path / "lora"
    write_adapter(adapter, tiny_llama_config())
    export_tiny(source, tmp_path / "out", lora=(AdapterChoice(adapter),))
    found = verify_layers(tmp_path / "out", str(source), silent, lora=(AdapterChoice(adapter),))
    assert found.passed
    assert found.same_source
    without = check(tmp_path / "out", source)
    assert without.first_departing is not None
    assert without.first_departing.name == "model.layers.0.self_attn.qkv_proj"
    with pytest.raises(UsageError, match="--lora"):
        verify_layers(tmp_path / "out", str(source), silent, lora=(AdapterChoice(adapter),), llama_cpp=True)


def test_a_short_context_shortens_the_proof(tmp_path: Path, source: Path) -> None:
    export_tiny(source, tmp_path / "out", max_context=24)
    found = check(tmp_path / "out", source)
    assert found.passed
    assert (found.prompt_tokens, found.greedy_tokens) == (16, 8)


FOLDERS: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_scaling": LLAMA3},
    "one layer, one key head": {"num_hidden_layers": 1, "num_key_value_heads": 1},
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_every_kind_pass(tmp_path: Path, name: str) -> None:
    source = write_hf_folder(tmp_path / "model", FOLDERS[name])
    export_tiny(source, tmp_path / "out")
    found = check(tmp_path / "out", source)
    assert found.passed, found.first_departing
    assert {stage.kind for stage in found.stages} == KINDS


@pytest.mark.parametrize("overrides", [{}, {"head_dim": 32}, {"rope_scaling": LLAMA3}])
def test_gguf_files_pass(tmp_path: Path, overrides: dict[str, Any]) -> None:
    source = write_gguf(tmp_path / "model.gguf", overrides)
    export_tiny(source, tmp_path / "out")
    assert check(tmp_path / "out", source).passed
