"""Every kind of adapter computes what PEFT computes with it, unmerged, and merges to PEFT's own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from llorch_export.adapter.apply import with_adapters
from llorch_export.adapter.choice import AdapterChoice
from llorch_export.checkpoint.base import Checkpoint
from llorch_export.source.open import open_checkpoint
from llorch_export.verify.reference import Reference
from llorch_serve.errors import ArtifactError
from support.builders.adapters import SHAPES, Factors, write_adapter
from support.builders.checkpoints import of_family, tiny_llama_config, write_gguf, write_hf_folder
from support.builders.tiny_exports import all_logits, export_tiny, random_ids
from support.oracles.peft_adapters import adapted_model, logits, make_adapter, merged_weights
from tolerances import FP32_LOGITS

pytestmark = pytest.mark.reference

QV = ["q_proj", "v_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TIED = {"tie_word_embeddings": True}
PHI3 = of_family("phi3")
QWEN2 = of_family("qwen2")
# Checkpoint, settings of PEFT, and whether PEFT's merge is what its forward pass computes.
MERGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all modules": ({}, {"target_modules": ALL}),
    "rslora": ({}, {"target_modules": QV, "use_rslora": True}),
    "fan_in_fan_out": ({}, {"target_modules": QV, "fan_in_fan_out": True}),
    "all-linear": ({}, {"target_modules": "all-linear"}),
    "expression": ({}, {"target_modules": r"model\.layers\.[\d]+\.(?:self_attn|mlp)\.(?:(?:q|up)_proj)"}),
    "excluded": ({}, {"target_modules": ALL, "exclude_modules": ["o_proj", "0.mlp.up_proj"]}),
    "excluded by expression": ({}, {"target_modules": ALL, "exclude_modules": r".*\.1\.mlp.*"}),
    "layers": ({}, {"target_modules": ALL, "layers_to_transform": 1, "layers_pattern": "layers"}),
    "patterns": (
        {},
        {
            "target_modules": ALL,
            "rank_pattern": {r"^model\.layers\.0\..*q_proj": 2, "(?:k|v)_proj": 6, "down_proj": 1},
            "alpha_pattern": {r"layers\.[1-9]\.mlp\.(up|gate)_proj": 3, "o_proj": 9},
        },
    ),
    "dora": ({}, {"target_modules": ALL, "use_dora": True}),
    "dora, rslora, patterns": (
        {},
        {"target_modules": ALL, "use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}},
    ),
    "dora on the embedding": ({}, {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "embedding and head": ({}, {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "biases": (QWEN2, {"target_modules": QV, "bias": "all"}),
    "biases of the adapted": (QWEN2, {"target_modules": QV, "bias": "lora_only"}),
    "lora_bias": (QWEN2, {"target_modules": QV, "lora_bias": True}),
    "biases, where there are none": ({}, {"target_modules": QV, "bias": "all"}),
    "saved tables": ({}, {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "biases of modules that have none": (
        of_family("qwen2"),
        {"target_modules": ["o_proj", "down_proj"], "bias": "lora_only"},
    ),
    "saved norms": ({}, {"target_modules": QV, "modules_to_save": ["norm"]}),
    "saved block": ({}, {"target_modules": QV, "modules_to_save": ["1.mlp"]}),
    "tokens": ({}, {"target_modules": QV, "trainable_token_indices": [5, 2, 77]}),
    "tokens by module": (
        {},
        {"target_modules": QV, "trainable_token_indices": {"embed_tokens": [5], "lm_head": [2, 77]}},
    ),
    "tied, tokens": (TIED, {"target_modules": QV, "trainable_token_indices": [5, 2, 77]}),
    "tied, all of both saved": (TIED, {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied, head saved": (TIED, {"target_modules": QV, "modules_to_save": ["lm_head"]}),
    "tied, embedding saved": (TIED, {"target_modules": QV, "modules_to_save": ["embed_tokens"]}),
    "tied, saved and kept": (
        TIED,
        {"target_modules": QV, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "fused": (PHI3, {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "fused, all-linear": (PHI3, {"target_modules": "all-linear"}),
    "fused, dora": (PHI3, {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True}),
    "gaussian": ({}, {"target_modules": QV, "init_lora_weights": "gaussian"}),
    "orthogonal": ({}, {"target_modules": QV, "init_lora_weights": "orthogonal"}),
}
# PEFT's merge of these fails, or changes both of two tied tables, which its forward pass does not.
UNMERGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora_bias without biases": ({}, {"target_modules": QV, "lora_bias": True}),
    "lora_bias of all": ({}, {"target_modules": ALL, "lora_bias": True}),
    "fused, lora_bias": (PHI3, {"target_modules": ["qkv_proj", "gate_up_proj"], "lora_bias": True}),
    "tied, embedding": (TIED, {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied, head": (TIED, {"target_modules": ["lm_head", "q_proj"]}),
    "tied, both": (TIED, {"target_modules": ["embed_tokens", "lm_head"]}),
    "tied, different tokens": (
        TIED,
        {"target_modules": QV, "trainable_token_indices": {"embed_tokens": [5], "lm_head": [2, 77]}},
    ),
    "tied, adapted and kept": (
        TIED,
        {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    ),
}
Logits = npt.NDArray[np.float32]
# What a cheaper row, or a test of the config's reader, nearly covers.
SLOW = {
    "rslora", "fan_in_fan_out", "excluded by expression", "layers", "dora", "biases of the adapted",
    "saved norms", "gaussian", "orthogonal", "tied, embedding saved", "lora_bias of all",
    "fused, all-linear", "tokens",
}  # fmt: skip
# Of those that PEFT merges, the ones that are exported too.
EXPORTED = {"dora, rslora, patterns", "biases", "tied, head saved", "fused"}
IDS = [5, 2, 77, *random_ids(29)]


def checkpoint_of(folder: Path, *choices: AdapterChoice) -> Checkpoint:
    return with_adapters(open_checkpoint(str(folder)), choices)


def artifact_logits(folder: Path, out: Path, *choices: AdapterChoice) -> Logits:
    return all_logits(export_tiny(folder, out, lora=choices), IDS)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in [*MERGED, *UNMERGED]],
)
def test_an_adapter_computes_what_peft_computes(tmp_path: Path, name: str) -> None:
    """So does the reference of ``llorch verify``, whose arithmetic is torch's own."""
    overrides, settings = (MERGED | UNMERGED)[name]
    folder, path = write_hf_folder(tmp_path / "model", overrides), tmp_path / "lora"
    make_adapter(folder, path, **{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings})
    model = adapted_model(folder, path)
    expected = logits(model, IDS)
    checkpoint = checkpoint_of(folder, AdapterChoice(path))
    np.testing.assert_allclose(Reference(checkpoint).logits(IDS), expected, atol=FP32_LOGITS, rtol=0)
    if name in UNMERGED or name in EXPORTED:
        ours = artifact_logits(folder, tmp_path / "out", AdapterChoice(path))
        np.testing.assert_allclose(ours, expected, atol=FP32_LOGITS, rtol=0)
    if name in MERGED:
        weights = merged_weights(model)
        for key, tensor in checkpoint.tensors.items():
            if key in weights:
                np.testing.assert_array_almost_equal_nulp(tensor.load(), weights[key].astype(np.float32), 1)


def test_an_adapter_that_has_lost_one_of_its_biases_is_refused(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "model", QWEN2)
    make_adapter(folder, tmp_path / "lora", r=2, target_modules=QV, bias="all", task_type="CAUSAL_LM")
    file = tmp_path / "lora" / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in tensors if "layers.1" in name and "k_proj" in name)]
    save_file(tensors, file)
    with pytest.raises(ArtifactError, match=r"lacks 1 biases .*, model\.layers\.1\.self_attn\.k_proj\.bias"):
        checkpoint_of(folder, AdapterChoice(tmp_path / "lora"))


def test_names_of_the_unfused_form_are_merged_into_a_fused_model(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "model", PHI3)
    write_adapter(tmp_path / "lora", tiny_llama_config(**PHI3))
    choice = AdapterChoice(tmp_path / "lora")
    reference = Reference(checkpoint_of(folder, choice)).logits(IDS)
    ours = artifact_logits(folder, tmp_path / "out", choice)
    np.testing.assert_allclose(ours, reference, atol=FP32_LOGITS, rtol=0)


def test_several_adapters_with_weights_are_what_the_reference_computes(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "model", TIED | QWEN2)
    first = {"target_modules": ALL, "bias": "all", "trainable_token_indices": [3, 4]}
    second = {"target_modules": QV, "use_rslora": True}
    for number, settings in enumerate((first, second)):
        make_adapter(folder, tmp_path / f"{number}", seed=number, task_type="CAUSAL_LM", **settings)
    choices = AdapterChoice(tmp_path / "0"), AdapterChoice(tmp_path / "1", -0.5)
    reference = Reference(checkpoint_of(folder, *choices)).logits(IDS)
    ours = artifact_logits(folder, tmp_path / "out", *choices)
    np.testing.assert_allclose(ours, reference, atol=FP32_LOGITS, rtol=0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_replaces_a_table_goes_before_what_is_added_to_it(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    folder = write_hf_folder(tmp_path / "model")
    rng = np.random.default_rng(3)
    tensors: tuple[Factors, Factors] = (
        {
            "lm_head.lora_A.weight": rng.normal(size=(4, 64)),
            "lm_head.lora_B.weight": rng.normal(size=(512, 4)),
        },
        {"lm_head.weight": rng.normal(size=(512, 64))},
    )
    settings = ({"target_modules": [*SHAPES, "lm_head"]}, {"modules_to_save": ["lm_head"]})
    for number, own in enumerate(settings):
        more = {f"base_model.model.{name}": value.astype("f4") for name, value in tensors[number].items()}
        write_adapter(
            tmp_path / f"{number}", tiny_llama_config(), edit=lambda s, more=more: s.update(more), **own
        )
    choices = [AdapterChoice(tmp_path / f"{number}") for number in order]
    checkpoint = checkpoint_of(folder, *choices)
    state = Reference(checkpoint).model.state_dict()
    for name in ("lm_head.weight", "model.layers.0.self_attn.q_proj.weight"):
        np.testing.assert_allclose(checkpoint.tensors[name].load(), state[name].numpy(), atol=1e-6, rtol=0)


# Settings with a vocabulary that was resized first, and whether tied tables stay one.
RESIZED: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({"target_modules": QV}, True),
    "tokens": ({"target_modules": QV, "trainable_token_indices": [*range(512, 520)]}, True),
    "tokens of both": (
        {"target_modules": QV, "trainable_token_indices": {"embed_tokens": [514], "lm_head": [514]}},
        True,
    ),
    "both saved": ({"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]}, False),
    "one saved": ({"target_modules": QV, "modules_to_save": ["embed_tokens"]}, False),
    "both adapted": ({"target_modules": ["embed_tokens", "lm_head"]}, False),
    "embedding adapted": ({"target_modules": ["embed_tokens", "q_proj"]}, False),
    "head adapted": ({"target_modules": ["lm_head", "q_proj"], "use_dora": True}, False),
}


# Of two tables PEFT saves none that is not adapted, so that a file with one of them is incomplete.
WITH_TWO_TABLES = [name for name in RESIZED if name not in ("embedding adapted", "head adapted")]


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        *((name, True) for name in RESIZED),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in WITH_TWO_TABLES),
    ],
)
def test_a_resized_vocabulary_computes_what_peft_computes(tmp_path: Path, name: str, tied: bool) -> None:
    settings, stay_tied = RESIZED[name]
    folder = write_hf_folder(tmp_path / "model", TIED if tied else {})
    make_adapter(folder, tmp_path / "lora", resize=520, **{"task_type": "CAUSAL_LM", **settings})
    expected = logits(adapted_model(folder, tmp_path / "lora", resize=520), [*IDS, 514])
    choice = AdapterChoice(tmp_path / "lora")
    checkpoint = checkpoint_of(folder, choice)
    assert checkpoint.config.tie_word_embeddings is (tied and stay_tied)
    assert checkpoint.config.vocab_size == 520
    found = Reference(checkpoint).logits([*IDS, 514])
    np.testing.assert_allclose(found, expected, atol=FP32_LOGITS, rtol=0)
    if tied:
        ours = all_logits(export_tiny(folder, tmp_path / "out", lora=(choice,)), [*IDS, 514])
        np.testing.assert_allclose(ours, expected, atol=FP32_LOGITS, rtol=0)


def test_a_gguf_file_is_adapted_as_the_folder_of_its_weights_is(tmp_path: Path) -> None:
    """Its tables come apart and it gets biases, none of which the file has."""
    folder, gguf = write_hf_folder(tmp_path / "m", TIED), write_gguf(tmp_path / "m.gguf", TIED)
    settings = {"target_modules": ["embed_tokens", "lm_head", "q_proj", "down_proj"]}
    make_adapter(folder, tmp_path / "lora", r=4, task_type="CAUSAL_LM", **settings)
    make_adapter(folder, tmp_path / "biased", r=4, task_type="CAUSAL_LM", target_modules=ALL, lora_bias=True)
    choices = AdapterChoice(tmp_path / "lora"), AdapterChoice(tmp_path / "biased", 0.5)
    expected = Reference(checkpoint_of(folder, *choices)).logits(IDS)
    ours = artifact_logits(gguf, tmp_path / "out", *choices)
    np.testing.assert_allclose(ours, expected, atol=FP32_LOGITS, rtol=0)
    reference = Reference(checkpoint_of(gguf, *choices)).logits(IDS)
    np.testing.assert_allclose(reference, expected, atol=FP32_LOGITS, rtol=0)
