"""config.json of every family: defaults, twists, and refusal of what the family does not have."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from llorch_export.checkpoint.names import expected_tensors, stored_tensors
from llorch_export.config.families import FAMILIES
from llorch_export.config.hf import config_from_hf
from llorch_serve.artifact.manifest import LlamaConfig, RopeConfig
from llorch_serve.errors import ArtifactError
from support.builders.arch_rows import HF
from support.builders.checkpoints import of_family, tiny_config, tiny_llama_config
from support.oracles.config_reading import PLAIN, window_of

# transformers writes the longer length inside the rope settings beside the shorter one outside, and reads the
# latter.
CONTRADICTORY_AS_WRITTEN = {"yarn, original beside"}
KINDS = ("full", "sliding")
SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], [2.0] * 8
KNOWN_TO_TRANSFORMERS = [
    name for name, row in HF.items() if not FAMILIES[row.get("model_type", "llama")].reference
]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def parse(model_type: str = "llama", **overrides: object) -> LlamaConfig:
    return config_from_hf(tiny_config(**of_family(model_type, **overrides)))


@pytest.mark.reference
@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_keys_mean_what_transformers_takes_them_to_mean(model_type: str) -> None:
    import transformers

    if FAMILIES[model_type].depth_scaled:
        with pytest.raises(ArtifactError, match="lacks scale_emb"):
            config_from_hf({"model_type": model_type})
        return
    found = config_from_hf({"model_type": model_type})
    expected = transformers.AutoConfig.for_model(model_type)
    for key in PLAIN:
        name = FAMILIES[model_type].norm_key if key == "rms_norm_eps" else key
        usual = expected.num_attention_heads if key == "num_key_value_heads" else None
        assert getattr(found, key) == (usual if (value := getattr(expected, name)) is None else value), key
    share = expected.hidden_size // expected.num_attention_heads
    assert found.head_dim == getattr(expected, "head_dim", None) or share
    by_kind = expected.rope_parameters
    settings = [by_kind] if "rope_theta" in by_kind else [by_kind[f"{kind}_attention"] for kind in KINDS]
    assert [rope.theta for rope in found.ropes] == [one["rope_theta"] for one in settings]
    if model_type == "smollm3":
        assert list(found.no_rope_layers) == expected.no_rope_layers
    if model_type == "granite":
        assert found.attention_multiplier == expected.attention_multiplier == 1.0
    layers = range(expected.num_hidden_layers)
    assert [found.window(layer) for layer in layers] == [window_of(expected, layer) for layer in layers]
    cap = getattr(expected, "final_logit_softcapping", None)
    assert found.form.logits_softcap == cap


@pytest.mark.reference
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "name", [name for name in KNOWN_TO_TRANSFORMERS if name not in CONTRADICTORY_AS_WRITTEN]
)
def test_what_transformers_writes_is_understood(name: str, whole: bool) -> None:
    """Its own files have every key of the class, or those that differ from the class."""
    import transformers

    data = tiny_config(**HF[name])
    model_type = data.pop("model_type")
    written = transformers.AutoConfig.for_model(model_type, **data)
    content = written.to_dict() if whole else written.to_diff_dict()
    assert config_from_hf(json.loads(json.dumps(content))) == config_from_hf(tiny_config(**HF[name]))


def test_a_manifest_from_before_there_were_families_still_loads() -> None:
    data = msgspec.to_builtins(tiny_llama_config())
    for key in ("qkv_bias", "qk_norm", "no_rope_layers", "sliding_window", "layer_types", "logits_scaling"):
        del data[key]
    for key in ("attention_factor", "beta_fast", "truncate", "short_factor", "rotary_dim"):
        del data["rope"][key]
    assert msgspec.convert(data, LlamaConfig) == tiny_llama_config()


def test_null_key_value_heads_mean_one_a_head_in_every_family() -> None:
    for model_type in FAMILIES:
        data = tiny_config(**of_family(model_type))
        assert config_from_hf({**data, "num_key_value_heads": None}).num_key_value_heads == 4


def test_tensors_follow_the_family() -> None:
    qwen2, qwen3, phi3 = (expected_tensors(parse(name)) for name in ("qwen2", "qwen3", "phi3"))
    assert qwen2["model.layers.0.self_attn.v_proj.bias"] == (32,)
    assert "model.layers.0.self_attn.o_proj.bias" not in qwen2
    assert qwen3["model.layers.1.self_attn.k_norm.weight"] == (16,)
    assert phi3["model.layers.0.self_attn.k_proj.weight"] == (32, 64)
    stored = stored_tensors(parse("phi3"))
    assert stored["model.layers.0.self_attn.qkv_proj.weight"] == (128, 64)
    assert stored["model.layers.1.mlp.gate_up_proj.weight"] == (192, 64)
    assert not any("q_proj" in name or ".up_proj" in name for name in stored)


@pytest.mark.parametrize(
    ("model_type", "overrides", "window", "layer_types"),
    [
        ("mistral", {"sliding_window": 9}, 9, ()),
        ("mistral", {"sliding_window": 9, "use_sliding_window": True}, 9, ()),
        ("mistral", {"sliding_window": 128}, None, ()),
        ("phi3", {"sliding_window": 127}, 127, ()),
        ("phi3", {}, None, ()),
        ("qwen2", {"sliding_window": 9}, None, ()),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True}, None, ()),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}, 9, ()),
        (
            "qwen3",
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
            9,
            ("full_attention", "sliding_attention"),
        ),
        (
            "smollm3",
            {"sliding_window": 9, "use_sliding_window": True, "no_rope_layers": [0, 1]},
            9,
            ("sliding_attention", "full_attention"),
        ),
        ("smollm3", {"sliding_window": 9, "use_sliding_window": True, "no_rope_layers": [1, 1]}, None, ()),
    ],
)
def test_windows_hold_in_the_layers_that_the_config_names(
    model_type: str, overrides: dict[str, object], window: int | None, layer_types: tuple[str, ...]
) -> None:
    config = parse(model_type, **overrides)
    assert (config.sliding_window, config.layer_types) == (window, layer_types)
    slides = [kind == "sliding_attention" for kind in layer_types] or [True, True]
    assert [config.window(layer) for layer in (0, 1)] == [window if s else None for s in slides]


def test_a_null_window_is_none_and_an_absent_one_is_the_family_default() -> None:
    data = tiny_config(**of_family("mistral", max_position_embeddings=8192))
    assert config_from_hf({**data, "sliding_window": None}).sliding_window is None
    assert config_from_hf(data).sliding_window == 4096


@pytest.mark.parametrize(
    ("overrides", "attention_factor"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.0}, 1.0),
        ({"factor": 0.5}, 1.0),
        ({"mscale": 0.7, "mscale_all_dim": 1.4}, (0.07 * math.log(4) + 1) / (0.14 * math.log(4) + 1)),
        ({"mscale": 0.7}, 0.1 * math.log(4) + 1),
        ({"mscale": 0.7, "mscale_all_dim": 1.4, "attention_factor": 2}, 2.0),
    ],
)
def test_yarn_resolves_its_attention_factor(overrides: dict[str, object], attention_factor: float) -> None:
    rope = parse(rope_scaling={**YARN, **overrides}).rope
    assert (rope.kind, rope.beta_fast, rope.beta_slow, rope.truncate) == ("yarn", 32.0, 1.0, True)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    assert rope.exact_positions is None


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_calls_longrope_by_three_names(name: str) -> None:
    scaling = {"type": name, "short_factor": SHORT, "long_factor": LONG}
    config = parse(
        "phi3", max_position_embeddings=512, original_max_position_embeddings=64, rope_scaling=scaling
    )
    assert config.rope == RopeConfig(
        theta=10000.0,
        kind="longrope",
        short_factor=tuple(SHORT),
        long_factor=tuple(LONG),
        original_max_position_embeddings=64,
        attention_factor=math.sqrt(1 + math.log(8) / math.log(64)),
    )
    assert config.max_exact_context == 64


def test_longrope_of_one_table_has_no_limit() -> None:
    scaling = {"rope_type": "longrope", "short_factor": LONG, "long_factor": LONG}
    config = parse(original_max_position_embeddings=64, rope_scaling=scaling)
    assert config.max_exact_context == config.max_position_embeddings == 128


def test_published_phi3_settings_are_accepted() -> None:
    config = parse(
        "phi3",
        auto_map={
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        attention_bias=False,
        mlp_bias=False,
        lm_head_bias=False,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        full_attn_mod=1,
        interpolate_factor=1,
        sliding_window=47,
        partial_rotary_factor=0.75,
    )
    assert (config.rotary_dim, config.sliding_window) == (12, 47)


@pytest.mark.parametrize(
    ("model_type", "overrides", "found"),
    [
        ("llama", {"logits_scaling": 8.0}, r"logits_scaling is 8.0, expected 1"),
        ("llama", {"no_rope_layers": [1, 0]}, r"some layers would not rotate"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5, expected 1"),
        ("llama", {"architectures": ["MistralForCausalLM"]}, r"expected \['LlamaForCausalLM'\] for "
            r"model_type "
            r"llama"),
        ("mistral", {"sliding_window": 0}, r"sliding_window is 0"),
        ("mistral", {"sliding_window": 9, "layer_types": ["full_attention"] * 2}, r"expected sliding_attention for"),
        ("qwen2", {"layer_types": ["full_attention"]}, r"layer_types has 1 items, expected 2"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, r"expected full_attention or "
            r"sliding_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, r"use_sliding_window is off"),
        ("qwen3", {"num_experts": 8}, r"num_experts is 8.*mixtures of experts"),
        ("smollm3", {"no_rope_layers": [1]}, r"expected 0 or 1 for each of 2 layers"),
        ("smollm3", {"no_rope_layers": [1, 2]}, r"expected 0 or 1"),
        ("smollm3", {"no_rope_layer_interval": 0}, r"no_rope_layer_interval is 0"),
        ("granite", {"residual_multiplier": 0.0}, r"residual_multiplier is 0.0"),
        ("granite", {"logits_scaling": math.inf}, r"logits_scaling is inf"),
        ("granite", {"sliding_window": 9}, r"sliding_window is 9"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2}}, r"type is 'linear', expected default or longrope"),
        ("phi3", {"full_attn_mod": 2}, r"full_attn_mod is 2, expected 1"),
        ("phi3", {"partial_rotary_factor": 0.2}, r"3 of 16 elements of a head are rotated"),
        ("phi3", {"partial_rotary_factor": 1.5}, r"partial_rotary_factor is 1.5"),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": SHORT}}, r"lacks long_factor"),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG[1:]}}, r"expected a list of 8 numbers"),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": [0.0] * 8}}, r"long_factor.*expected numbers above "
            r"1e-06"),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": ["2"] * 8}}, r"long_factor.*expected numbers"),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG, "long_mscale": 1.2}}, r"long_mscale is 1.2, expected 1"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64}}, r"expected it beside the rotary settings"),
        ("llama", {"rope_scaling": {**YARN, "beta_fast": 0}}, r"beta_fast is 0"),
        ("llama", {"rope_scaling": {"type": "yarn"}}, r"lacks factor"),
        ("llama", {"rope_theta": 1.0, "rope_scaling": YARN}, r"expected a number above 1"),
        ("llama", {"rope_scaling": {"type": "dynamic"}}, r"lacks factor"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}}, r"original_max_position_embeddings is 64, expected 128"),
        ("llama", {"original_max_position_embeddings": 64, "rope_scaling": YARN}, r"original_max_position_embeddings "
            r"differs"),
    ],
)  # fmt: skip
def test_what_a_family_does_not_have_is_refused_by_name(
    model_type: str, overrides: dict[str, object], found: str
) -> None:
    with pytest.raises(ArtifactError, match=found) as caught:
        parse(model_type, **overrides)
    assert "\n" not in str(caught.value)


STRANGE = [
    None,
    True,
    0,
    -1,
    2**70,
    0.5,
    math.nan,
    math.inf,
    "x",
    "",
    [],
    [1],
    ["x"],
    [None],
    {},
    {"a": 1},
    [[]],
]


@pytest.mark.parametrize(
    "name",
    [
        "llama3",
        "yarn",
        "dynamic",
        "qwen3, window and yarn",
        "smollm3, layers",
        "granite",
        "phi3, longrope, partial",
    ],
)
def test_a_strange_value_of_any_key_is_accepted_or_refused_in_one_line(name: str) -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    overrides = HF.get(name, {"rope_scaling": {"rope_type": "llama3", **llama3}})
    data = tiny_config(**overrides)
    refusals = []
    for strange in STRANGE:
        cases = [
            {**data, key: strange}
            for key in (*data, "layer_types", "no_rope_layers", "partial_rotary_factor")
        ]
        scaling = overrides.get("rope_scaling", {})
        cases += [
            {**data, "rope_scaling": {**scaling, key: strange}}
            for key in (*scaling, "type", "mscale", "truncate")
        ]
        for case in cases:
            try:
                config_from_hf(case)
            except ArtifactError as error:
                refusals.append(str(error))
    assert len(refusals) > 100
    assert not [message for message in refusals if "\n" in message]
