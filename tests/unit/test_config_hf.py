"""config.json is understood completely or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from llorch_export.checkpoint.names import expected_tensors
from llorch_export.config.families import SUPPORTED_HF
from llorch_export.config.hf import config_from_hf
from llorch_export.source.open import open_config
from llorch_serve.artifact.manifest import RopeConfig
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import tiny_config

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


# Parameter counts as published with the models.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-8b", 8_030_261_248),
    ],
)
def test_published_configs_give_their_exact_number_of_parameters(name: str, parameters: int) -> None:
    config = open_config(str(CONFIGS / name))
    assert sum(math.prod(shape) for shape in expected_tensors(config).values()) == parameters


def test_llama_3_70b_has_its_exact_shapes() -> None:
    shapes = expected_tensors(open_config(str(CONFIGS / "llama-3-70b")))
    assert len(shapes) == 3 + 80 * 9
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (128256, 8192)
    assert shapes["model.layers.79.self_attn.q_proj.weight"] == (8192, 8192)
    assert shapes["model.layers.79.self_attn.k_proj.weight"] == (1024, 8192)
    assert shapes["model.layers.79.mlp.down_proj.weight"] == (8192, 28672)
    assert shapes["model.norm.weight"] == (8192,)


def test_llama_2_70b_shares_eight_key_value_heads() -> None:
    config = open_config(str(CONFIGS / "llama-2-70b"))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (64, 8, 128)
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.max_position_embeddings == 4096


def test_absent_keys_mean_what_transformers_takes_them_to_mean() -> None:
    config = config_from_hf({"model_type": "llama"})
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (32000, 4096, 11008)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (32, 32, 32)
    assert (config.head_dim, config.max_position_embeddings, config.rms_norm_eps) == (128, 2048, 1e-6)
    assert config.rope == RopeConfig(theta=10000.0)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_key_value_heads_may_be_one_some_or_all(kv_heads: int) -> None:
    config = config_from_hf(tiny_config(num_key_value_heads=kv_heads))
    assert expected_tensors(config)["model.layers.0.self_attn.k_proj.weight"] == (kv_heads * 16, 64)


def test_head_dim_is_independent_of_hidden_size() -> None:
    config = config_from_hf(tiny_config(hidden_size=56, num_attention_heads=6, head_dim=16))
    shapes = expected_tensors(config)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (96, 56)
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (56, 96)


def test_biases_and_tying_change_the_expected_tensors() -> None:
    shapes = expected_tensors(
        config_from_hf(tiny_config(attention_bias=True, mlp_bias=True, tie_word_embeddings=True))
    )
    assert shapes["model.layers.0.self_attn.o_proj.bias"] == (64,)
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == (32,)
    assert shapes["model.layers.1.mlp.up_proj.bias"] == (96,)
    assert "lm_head.weight" not in shapes


@pytest.mark.parametrize("name_key", ["type", "rope_type"])
def test_llama3_scaling_is_read_under_either_name(name_key: str) -> None:
    config = config_from_hf(tiny_config(rope_scaling={name_key: "llama3", **LLAMA3_SCALING}))
    assert config.rope == RopeConfig(theta=10000.0, kind="llama3", **LLAMA3_SCALING)  # type: ignore[arg-type]


@pytest.mark.parametrize("name_key", ["type", "rope_type"])
def test_linear_scaling_is_read_under_either_name(name_key: str) -> None:
    config = config_from_hf(tiny_config(rope_scaling={name_key: "linear", "factor": 4}))
    assert config.rope == RopeConfig(theta=10000.0, kind="linear", factor=4.0)


def test_theta_nested_in_rope_parameters_is_used() -> None:
    config = config_from_hf(
        tiny_config(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    )
    assert config.rope == RopeConfig(theta=500000.0)


def test_theta_beside_rope_parameters_is_used_if_they_have_none() -> None:
    config = config_from_hf(
        tiny_config(rope_theta=700.0, rope_parameters={"rope_type": "linear", "factor": 2.0})
    )
    assert config.rope == RopeConfig(theta=700.0, kind="linear", factor=2.0)


def test_equal_rope_scaling_and_rope_parameters_are_accepted() -> None:
    rope = {"rope_type": "linear", "factor": 2.0}
    assert config_from_hf(tiny_config(rope_scaling=rope, rope_parameters=dict(rope))).rope.factor == 2.0


@pytest.mark.parametrize("kind", ["proportional", "ntk", "su", "frobnicate"])
@pytest.mark.parametrize("name_key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_other_rope_types_are_refused_by_name(kind: str, name_key: str, place: str) -> None:
    with pytest.raises(
        ArtifactError,
        match=f"'{kind}' is not supported; supported are default, linear, llama3, dynamic, yarn and longrope",
    ):
        config_from_hf(tiny_config(**{place: {name_key: kind, "factor": 2.0}}))


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("gemma3n_text", "Gemma3nForCausalLM"),
        ("falcon", "FalconForCausalLM"),
        ("dbrx", "DbrxForCausalLM"),
        ("phimoe", "PhimoeForCausalLM"),
        ("deepseek_v3", "DeepseekV3ForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("llama4", "Llama4ForConditionalGeneration"),
        ("mamba", "MambaForCausalLM"),
    ],
)
def test_other_families_are_refused_by_name_with_the_list_of_what_is_supported(
    model_type: str, architecture: str
) -> None:
    wanted = f"model_type is '{model_type}'.*; {SUPPORTED_HF}$"
    with pytest.raises(ArtifactError, match=wanted):
        config_from_hf(tiny_config(model_type=model_type, architectures=[architecture]))


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ({"model_type": "bloom"}, f"model_type is 'bloom'; {SUPPORTED_HF}"),
        ({"model_type": None}, r"model_type is None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"a model that classifies or scores texts"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu', expected 'silu'"),
        ({"sliding_window": 64}, r"sliding_window is 64"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config"),
        ({"rope_interleaved": True}, r"rope_interleaved is True"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5"),
        ({"is_encoder_decoder": True}, r"is_encoder_decoder"),
        ({"auto_map": "x.Y"}, r"auto_map is 'x.Y', expected an object"),
        ({"auto_map": {"AutoModel": 3}}, r"auto_map is .*expected up to 32 classes"),
        ({"logits_scaling": 8.0}, r"logits_scaling is 8.0, expected 1 or none"),
        ({"qk_norm": True}, r"qk_norm is True, expected False or none"),
        ({"use_mrope": True}, r"use_mrope is True, expected False or none"),
        ({"is_causal": False}, r"is_causal is False.*tokens would see those after them"),
        ({"transformers_weights": "other.safetensors"}, r"weights would come from another file"),
        ({"layer_types": ["sliding_attention"] * 2}, r"layer_types is .*expected full_attention"),
        ({"quantization": {"group_size": 64, "bits": 4}}, r"quantization says .* packed as MLX groups with 4 bits"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling lacks factor"),
        ({"rope_scaling": {"factor": 2.0}}, r"factor is 2.0, expected 1"),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 2.0}}, r"'linear' by type and 'llama3' by "
            r"rope_type"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3_SCALING, "high_freq_factor": 0.5}}, r"high_freq_factor is 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}, r"contradict"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, r"rope_theta differs"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"full_attention is .*by kind of layer are not supported"),
        ({"rope_scaling": "linear"}, r"rope_scaling is 'linear', expected an object"),
        ({"rope_theta": 0}, r"rope_theta is 0, expected a number above 1e-06"),
        ({"rope_theta": math.nan}, r"rope_theta is nan"),
        ({"hidden_size": -64}, r"hidden_size is -64"),
        ({"hidden_size": 2**40}, r"hidden_size is 1099511627776"),
        ({"hidden_size": "64"}, r"hidden_size is '64'"),
        ({"hidden_size": True}, r"hidden_size is True"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, r"4 attention heads cannot share 3 key-value heads"),
        ({"head_dim": 15}, r"heads have 15 elements, expected an even number"),
        ({"head_dim": 0}, r"head_dim is 0"),
        ({"hidden_size": 56, "num_attention_heads": 6, "num_key_value_heads": 6}, r"lacks head_dim.*hidden size 56 and 6"),
        ({"rms_norm_eps": 0.0}, r"rms_norm_eps is 0.0"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings is 'yes', expected true or false"),
        ({"vocab_size": 1e300}, r"vocab_size"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(overrides: dict[str, object], found: str) -> None:
    with pytest.raises(ArtifactError, match=found) as caught:
        config_from_hf(tiny_config(**overrides))
    assert "\n" not in str(caught.value)


def test_null_and_inert_settings_are_accepted() -> None:
    plain = config_from_hf(tiny_config())
    data = tiny_config() | {
        "sliding_window": None,
        "quantization_config": None,
        "rope_scaling": None,
        "some_future_feature": None,
        "pretraining_tp": 2,
        "transformers.js_config": {"dtype": "q4"},
        "is_llama_config": True,
        "rope_interleaved": False,
        "is_decoder": True,
    }
    assert config_from_hf(json.loads(json.dumps(data))) == plain
