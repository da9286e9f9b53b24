"""GGUF metadata is understood completely or refused by name."""

from __future__ import annotations

import pytest

from llorch_export.checkpoint.names import expected_tensors
from llorch_export.config.families import SUPPORTED_GGUF
from llorch_export.config.gguf import config_from_gguf
from llorch_export.config.gguf_rope import GgufRopeTensors
from llorch_serve.artifact.manifest import LlamaConfig, RopeConfig
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import gguf_metadata, gguf_tensor_name, tiny_llama_config


def _parse(config: LlamaConfig, changes: dict[str, object] | None = None, **arguments: object) -> LlamaConfig:
    metadata = {"general.architecture": "llama", **gguf_metadata(config), **(changes or {})}
    shapes = {gguf_tensor_name(name): shape for name, shape in expected_tensors(config).items()}
    present = {key: value for key, value in metadata.items() if value is not None}
    return config_from_gguf(present, shapes, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_key_value_heads": 1},
        {"head_dim": 32},
        {"hidden_size": 56, "num_attention_heads": 6, "head_dim": 16},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"tie_word_embeddings": True},
        {"rope_theta": 500000.0},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
    ],
)
def test_metadata_and_config_json_of_one_model_give_one_config(overrides: dict[str, object]) -> None:
    config = tiny_llama_config(**overrides)
    assert _parse(config) == config


def test_absent_optional_keys_have_llama_cpp_defaults() -> None:
    changes: dict[str, object] = {
        f"llama.{key}": None
        for key in (
            "attention.head_count_kv",
            "attention.key_length",
            "attention.value_length",
            "rope.dimension_count",
            "rope.freq_base",
            "vocab_size",
        )
    }
    config = tiny_llama_config(num_key_value_heads=4, vocab_size=300)
    assert _parse(config, changes) == config


def test_old_conversions_state_the_head_size_by_the_rotated_part() -> None:
    changes: dict[str, object] = {"llama.attention.key_length": None, "llama.attention.value_length": None}
    config = tiny_llama_config(head_dim=32)
    assert _parse(config, changes) == config


def test_the_embedding_decides_the_vocabulary() -> None:
    assert _parse(tiny_llama_config(vocab_size=500), {"llama.vocab_size": 512}).vocab_size == 500


def test_frequency_factors_are_carried_over_and_multiply_linear_scaling() -> None:
    factors = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 8.0]
    config = tiny_llama_config()
    plain = _parse(config, rope_tensors=GgufRopeTensors(plain=factors))
    assert plain.rope == RopeConfig(theta=10000.0, kind="factors", frequency_factors=tuple(factors))
    scaled = _parse(
        config,
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
        rope_tensors=GgufRopeTensors(plain=factors),
    )
    assert scaled.rope.frequency_factors == tuple(2 * factor for factor in factors)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scale_linear": 2.0}, 2.0),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, None),
        (
            {
                "llama.rope.scaling.type": "linear",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.finetuned": True,
            },
            4.0,
        ),
    ],
)
def test_linear_scaling_follows_llama_cpp(changes: dict[str, object], factor: float | None) -> None:
    rope = _parse(tiny_llama_config(), changes).rope
    assert (rope.kind, rope.factor) == (("linear", factor) if factor else ("default", None))


@pytest.mark.parametrize(
    "name", ["gemma3n", "plamo", "dbrx", "phimoe", "deepseek2", "jamba", "gpt2", "mamba", "t5"]
)
def test_other_architectures_are_refused_by_name_with_the_list_of_what_is_supported(name: str) -> None:
    wanted = f"general.architecture is '{name}'; {SUPPORTED_GGUF}$"
    with pytest.raises(ArtifactError, match=wanted):
        _parse(tiny_llama_config(), {"general.architecture": name})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"general.architecture": "bloom"}, f"general.architecture is 'bloom'; {SUPPORTED_GGUF}"),
        ({"general.type": "adapter"}, r"general.type is 'adapter'"),
        ({"llama.expert_count": 8}, r"lacks llama.expert_used_count"),
        ({"llama.rope.scaling.type": "ntk"}, r"'ntk'; supported are none, linear, yarn and longrope"),
        ({"llama.rope.scaling.attn_factor": 0.0}, r"attn_factor is 0.0"),
        ({"llama.rope.dimension_count": 8}, r"rope.dimension_count is 8, expected 16"),
        ({"llama.attention.value_length": 8}, r"value_length is 8, expected 16"),
        ({"llama.attention.sliding_window": 128}, r"sliding_window is 128"),
        ({"llama.attention.causal": False}, r"attention.causal is False"),
        ({"llama.attention.scale": 0.1, "llama.logit_scale": 2.0}, r"not understood.*llama.attention.scale, "
            r"llama.logit_scale"),
        ({"llama.attention.head_count": [4, 2]}, r"head_count is \[4, 2\]"),
        ({"llama.block_count": 2**31}, r"llama.block_count is 2147483648"),
        ({"llama.block_count": None}, r"lacks llama.block_count"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, r"lacks llama.attention.layer_norm_rms_epsilon"),
        ({"llama.attention.head_count_kv": 3}, r"4 attention heads cannot share 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(changes: dict[str, object], found: str) -> None:
    with pytest.raises(ArtifactError, match=found):
        _parse(tiny_llama_config(), changes)


@pytest.mark.parametrize("factors", [[1.0], [0.0] * 8, [float("nan")] * 8, [float("inf")] * 8])
def test_unusable_frequency_factors_are_refused(factors: list[float]) -> None:
    with pytest.raises(ArtifactError, match=r"rope_freqs.weight must hold 8 positive numbers"):
        _parse(tiny_llama_config(), rope_tensors=GgufRopeTensors(plain=factors))


def test_a_file_without_embedding_is_refused() -> None:
    with pytest.raises(ArtifactError, match=r"lacks a two-dimensional tensor token_embd.weight"):
        config_from_gguf({"general.architecture": "llama", **gguf_metadata(tiny_llama_config())}, {})
