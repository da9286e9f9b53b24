"""Mixtures of experts in a config.json: what transformers takes the keys to mean, and what cannot be."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from llorch_export.checkpoint.expert_names import names_in_use
from llorch_export.checkpoint.names import expected_tensors, parameters, stored_places, stored_tensors
from llorch_export.config.experts import BY_EXPERT, MAX_MATRICES, MIXTRAL, STACKED
from llorch_export.config.hf import read_config
from llorch_serve.artifact.manifest import ExpertsConfig, LlamaConfig
from llorch_serve.errors import ArtifactError
from support.builders.arch_rows_experts import QWEN2_MOE, QWEN3_MOE
from support.builders.checkpoints import of_family, tiny_config

MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "vocab_size": 32000,
}


def parse(model_type: str, **overrides: Any) -> LlamaConfig:
    return read_config(tiny_config(**of_family(model_type, **overrides))).config


def sparse(config: LlamaConfig) -> list[bool]:
    return [config.layer_experts(layer) is not None for layer in range(config.num_hidden_layers)]


def test_the_published_number_of_parameters() -> None:
    assert round(parameters(read_config(MIXTRAL_8X7B).config) / 1e9, 1) == 46.7


def test_layers_without_experts_are_those_that_the_config_lists_or_steps_over() -> None:
    many = {**QWEN3_MOE, "num_hidden_layers": 5}
    assert sparse(parse("qwen3_moe", **many)) == [True] * 5
    assert sparse(parse("qwen3_moe", **many, decoder_sparse_step=2)) == [False, True, False, True, False]
    assert sparse(parse("qwen3_moe", **many, mlp_only_layers=[0, 4, 9])) == [False, True, True, True, False]
    assert not parse("qwen3_moe", **many, mlp_only_layers=[0, 1, 2, 3, 4]).experts
    assert not parse("qwen3_moe", **{**many, "num_experts": 0}).experts


def test_the_width_for_one_token_is_that_of_all_that_it_takes() -> None:
    assert parse("mixtral", num_experts_per_tok=3).active_intermediate_size == 3 * 96
    assert parse("qwen2_moe", **QWEN2_MOE).active_intermediate_size == 3 * 32 + 48
    assert parse("qwen2_moe", **QWEN2_MOE, decoder_sparse_step=2).active_intermediate_size == 144
    wide = parse("qwen2_moe", **QWEN2_MOE, decoder_sparse_step=2, intermediate_size=200)
    assert wide.active_intermediate_size == 200


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_experts_per_tok": 9}, "each token takes 9 of 8 experts"),
        ({"num_local_experts": 0}, "num_local_experts is 0, expected an integer from 1"),
        ({"num_local_experts": 4, "num_experts": 5}, "num_local_experts is 4, expected the same"),
        ({"num_local_experts": "8"}, "num_local_experts is '8'"),
        ({"num_local_experts": 10**9}, "num_local_experts is 1000000000"),
        ({"num_local_experts": 4096, "num_hidden_layers": 17}, f"expected at most {MAX_MATRICES} experts"),
    ],
)
def test_what_cannot_be_is_refused_by_name(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        parse("mixtral", **overrides)


@pytest.mark.parametrize("key", ["decoder_sparse_step", "moe_intermediate_size"])
def test_a_step_or_width_of_zero_is_refused(key: str) -> None:
    with pytest.raises(ArtifactError, match=f"{key} is 0, expected an integer from 1"):
        parse("qwen3_moe", **{**QWEN3_MOE, key: 0})


def test_losses_and_noise_of_training_are_no_notice() -> None:
    settings = {"router_aux_loss_coef": 0.02, "router_jitter_noise": 0.1, "output_router_logits": True}
    data = tiny_config(**of_family("mixtral", **settings))
    assert read_config(data).ignored_settings == ()
    assert read_config(data).config == parse("mixtral")


def test_a_norm_over_heads_that_the_config_names_is_the_familys_own() -> None:
    assert parse("qwen3_moe", **QWEN3_MOE, use_qk_norm=True) == parse("qwen3_moe", **QWEN3_MOE)
    with pytest.raises(ArtifactError, match="use_qk_norm is False, expected True"):
        parse("qwen3_moe", **QWEN3_MOE, use_qk_norm=False)


def test_each_matrix_of_an_expert_is_some_rows_of_what_is_stored() -> None:
    config = parse("mixtral", num_local_experts=4)
    whole = expected_tensors(config)
    for names in (None, STACKED, MIXTRAL):
        stored, places = stored_tensors(config, names), stored_places(config, names)
        assert places.keys() == whole.keys()
        assert sum(map(math.prod, stored.values())) == sum(map(math.prod, whole.values()))
        for name, place in places.items():
            rows = math.prod(stored[place.name][:-1])
            assert (place.stop or rows) - place.start == whole[name][0] or len(whole[name]) == 1
    stacked = stored_tensors(config, STACKED)
    assert stacked["model.layers.1.mlp.experts.gate_up_proj"] == (4, 192, 64)
    assert stacked["model.layers.1.mlp.experts.down_proj"] == (4, 64, 96)


def test_names_in_use_are_found_in_the_first_layer_that_has_experts() -> None:
    config = parse("qwen3_moe", **QWEN3_MOE, mlp_only_layers=[0])
    assert names_in_use(config, ["model.layers.1.mlp.experts.0.down_proj.weight"]) is BY_EXPERT
    assert names_in_use(config, ["module.model.layers.1.mlp.experts.down_proj"]) is STACKED
    assert names_in_use(config, []) is STACKED
    assert names_in_use(parse("llama", head_dim=None), []) is None


def test_the_manifest_of_a_model_without_experts_does_not_name_them() -> None:
    assert b"experts" not in msgspec.json.encode(parse("qwen2"))
    found = parse("qwen3_moe", **QWEN3_MOE)
    assert isinstance(found.experts, ExpertsConfig)
    assert msgspec.json.decode(msgspec.json.encode(found), type=LlamaConfig) == found
