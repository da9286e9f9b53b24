"""GGUF metadata of every family gives the config of the folder, or is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llorch_export.checkpoint.names import stored_tensors
from llorch_export.config.experts import GGUF_STACKED
from llorch_export.config.families import FAMILIES
from llorch_export.config.gguf import config_from_gguf
from llorch_export.config.gguf_rope import GgufRopeTensors
from llorch_serve.artifact.manifest import LlamaConfig, RopeConfig
from llorch_serve.errors import ArtifactError
from support.builders.arch_rows import GGUF, HF, LONG, SHORT
from support.builders.checkpoints import gguf_metadata, gguf_tensor_name, of_family, tiny_llama_config


def parse(
    config: LlamaConfig, changes: dict[str, object] | None = None, tensors: GgufRopeTensors | None = None
) -> LlamaConfig:
    name = FAMILIES[config.architecture].gguf_name
    metadata = {"general.architecture": name, **gguf_metadata(config), **(changes or {})}
    stored = stored_tensors(config, GGUF_STACKED if config.experts else None)
    shapes = {gguf_tensor_name(n, name): s for n, s in stored.items()}
    present = {key: value for key, value in metadata.items() if value is not None}
    return config_from_gguf(present, shapes, rope_tensors=tensors)


def divisors(rope: RopeConfig) -> GgufRopeTensors:
    return GgufRopeTensors(short=rope.short_factor, long=rope.long_factor)


# The rotation of apertus lies in a tensor.
@pytest.mark.parametrize("name", [name for name in GGUF if "betas" not in name and name != "apertus"])
def test_metadata_and_config_json_of_one_model_give_one_config(name: str) -> None:
    config = tiny_llama_config(**HF[name])
    assert parse(config, tensors=divisors(config.rope)) == config


def test_yarn_betas_and_attention_factor_are_read() -> None:
    config = tiny_llama_config(**HF["yarn"])
    scaling = {"yarn_beta_fast": 6.0, "yarn_beta_slow": 0.5, "attn_factor": 2.0, "yarn_ext_factor": 1.0}
    rope = parse(config, {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}).rope
    assert (rope.beta_fast, rope.beta_slow) == (6.0, 0.5)
    assert rope.attention_factor == pytest.approx(2 * config.rope.attention_factor)


def test_a_file_without_a_window_has_none_where_the_family_may_have_none() -> None:
    config = tiny_llama_config(**HF["exaone4"])
    for stated in (None, 0):
        found = parse(config, {"exaone4.attention.sliding_window": stated})
        assert (found.sliding_window, found.layer_types, found.no_rope_layers) == (None, (), ())


@pytest.mark.parametrize(("family", "window"), [("gemma3", None), ("gemma2", 4096)])
def test_a_file_without_a_window_has_the_one_that_llama_cpp_takes_it_to_have(
    family: str, window: int | None
) -> None:
    config = tiny_llama_config(**HF[f"{family}, tied"], max_position_embeddings=8192)
    found = parse(config, {f"{family}.attention.sliding_window": None})
    assert found.sliding_window == window
    assert bool(found.layer_types) is (window is not None)


@pytest.mark.parametrize("kind", [bool, int])
def test_a_pattern_of_windows_is_a_list_or_a_number(kind: type) -> None:
    config = tiny_llama_config(**HF["gemma2, tied"])
    key = "gemma2.attention.sliding_window_pattern"
    for pattern, stated in (((0, 1, 1), [kind(each) for each in (0, 1, 1)]), ((1, 1, 0), 3)):
        types = tuple("sliding_attention" if each else "full_attention" for each in pattern)
        assert parse(config, {key: stated}).layer_types == types


def test_files_of_one_architecture_are_of_the_generation_that_states_a_window() -> None:
    config = tiny_llama_config(**HF["olmo2"])
    assert parse(config, {"olmo2.attention.sliding_window": 0}).architecture == "olmo2"
    assert parse(config, {"olmo2.attention.sliding_window": 9}).architecture == "olmo3"


def test_layers_with_a_window_rotate_as_the_others_where_no_base_is_theirs() -> None:
    config = tiny_llama_config(**HF["olmo3, yarn where there is no window"])
    sliding = parse(config, {"olmo2.rope.freq_base_swa": None}).form.sliding_rope
    assert sliding == RopeConfig(theta=config.rope.theta)
    assert config.rope.theta == 10000.0


def test_the_log_multiplier_divides_what_yarn_multiplies_scores_by() -> None:
    config = tiny_llama_config(**HF["ministral3"])
    key = "mistral3.rope.scaling.yarn_log_multiplier"
    assert parse(config, {key: 1.0}).rope.attention_factor == pytest.approx(1.0)
    expected = (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert parse(config, {key: 0.5}).rope.attention_factor == pytest.approx(expected)


def test_zero_multipliers_mean_none_as_in_llama_cpp() -> None:
    config = tiny_llama_config(**of_family("granite"))
    changes: dict[str, object] = {
        "granite.embedding_scale": 0.0,
        "granite.residual_scale": None,
        "granite.logit_scale": 0.0,
        "granite.attention.scale": None,
        "granite.rope.scaling.finetuned": True,
    }
    found = parse(config, changes)
    assert (found.embedding_multiplier, found.residual_multiplier, found.logits_scaling) == (1.0, 1.0, 1.0)
    assert found.attention_multiplier is None


def test_phi3_states_no_head_size_and_only_what_is_rotated() -> None:
    config = tiny_llama_config(**HF["phi3, half rotated"])
    changes: dict[str, object] = {"phi3.attention.key_length": None, "phi3.attention.value_length": None}
    assert parse(config, changes) == config
    assert (config.head_dim, config.rotary_dim) == (16, 8)


@pytest.mark.parametrize(
    ("family", "changes", "tensors", "found"),
    [
        ("llama", {"general.architecture": "mistral"}, None, r"general.architecture is 'mistral'; supported "
            r"architectures are llama, "
            r"qwen2"),
        ("qwen2", {"qwen2.attention.sliding_window": 9}, None, r"sliding_window is 9"),
        ("qwen2", {"qwen2.rope.dimension_count": 8}, None, r"rope.dimension_count is 8, expected 16"),
        ("qwen3", {"qwen3.expert_count": 8}, None, r"expert_count is 8"),
        ("qwen3", {"qwen3.rope.scaling.yarn_beta_fast": 8.0}, None, r"not understood.*yarn_beta_fast"),
        ("gemma2", {"gemma2.attention.sliding_window_pattern": [True]}, None, r"pattern has 1 items, expected 2"),
        ("gemma2", {"gemma2.attention.sliding_window_pattern": [0, 2]}, None, r"true or false for each of 2"),
        ("gemma2", {"gemma2.attention.sliding_window_pattern": [True, 1]}, None, r"expected a list of bool"),
        ("gemma3_text", {"gemma3.attention.sliding_window": -1}, None, r"sliding_window is -1"),
        ("ministral3", {"mistral3.attention.temperature_scale": -0.1}, None, r"temperature_scale is -0.1"),
        ("smollm3", {"smollm3.embedding_scale": 2.0}, None, r"not understood.*embedding_scale"),
        ("granite", {"granite.rope.scaling.finetuned": False}, None, r"finetuned is False, expected True"),
        ("granite", {"granite.residual_scale": -1.0}, None, r"residual_scale is -1.0"),
        ("phi3", {"phi3.rope.dimension_count": 7}, None, r"7 of 16 elements of a head are rotated"),
        ("phi3", {"phi3.rope.scaling.type": "longrope"}, None, r"rope_factors_short.weight must hold 8"),
        ("phi3", {}, GgufRopeTensors(short=SHORT), r"rope_factors_long.weight must hold 8"),
        ("phi3", {}, GgufRopeTensors(short=SHORT, long=LONG[1:]), r"rope_factors_long.weight must hold 8"),
        ("phi3", {"phi3.rope.scaling.factor": 4.0}, GgufRopeTensors(short=SHORT, long=LONG), r"combines longrope"),
        ("llama", {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1}, None, r"yarn_log_multiplier is 0.1"),
        ("llama", {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5}, None, r"yarn_ext_factor is 0.5"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, GgufRopeTensors(plain=SHORT), r"combines yarn with rope_freqs"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(
    family: str, changes: dict[str, Any], tensors: GgufRopeTensors | None, found: str
) -> None:
    with pytest.raises(ArtifactError, match=found):
        parse(tiny_llama_config(**of_family(family)), changes, tensors)
