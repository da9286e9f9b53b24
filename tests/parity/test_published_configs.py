"""Configs of published models are read as transformers reads them, or refused for a reason that holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llorch_export.config.hf import read_config
from llorch_serve.errors import ArtifactError
from support.oracles.config_reading import differences, transformers_config

PUBLISHED = Path(__file__).parent.parent / "data" / "published" / "configs.jsonl"
CONFIGS: dict[str, dict[str, Any]] = {
    row["name"]: row["config"] for row in map(json.loads, PUBLISHED.read_text(encoding="utf-8").splitlines())
}
# Every one that is refused, and why.
REFUSED = {
    "Alibaba-NLP__gte-Qwen2-7B-instruct": "is_causal is False",
    "Skywork__Skywork-Reward-Llama-3.1-8B-v0.2": "a model that classifies or scores texts",
    "intfloat__e5-mistral-7b-instruct": "a model without an output layer, for embeddings",
    "mlc-preset__minicpm-moe-8x2b": "num_experts is 8, .*layers would be mixtures of experts",
}
OTHERS: dict[str, dict[str, Any]] = {
    row["config"]["model_type"]: row["config"]
    for row in map(json.loads, PUBLISHED.with_name("other_configs.jsonl").read_text("utf-8").splitlines())
}
MORE_THAN_TEXT = "which takes more than text"
EXPERTS = "which arranges its experts in a way of its own"
LATENT = "which compresses keys and values into one latent vector"
RECURRENT = "which has layers with a recurrent state in the place of attention"
GPT_2 = r"which is built as GPT-2, with blocks that no graph here has \(n_embd\)"
CODE = r"which exists only as code of the checkpoint \(.*\), and that is never run"
NOWHERE = "of which transformers has no language model"
# What a person would say of each, by its model_type.
REASONS = {
    "baichuan": NOWHERE,
    "bamboo": CODE,
    "chatglm": CODE,
    "deepseek": EXPERTS,
    "deepseek_ref": "which chooses by an index which tokens attention sees",
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v4": "which chooses by an index which tokens attention sees",
    "gemma3": MORE_THAN_TEXT,
    "gemma4": MORE_THAN_TEXT,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gpt2": GPT_2,
    "gpt_bigcode": GPT_2,
    "gptj": GPT_2,
    "hunyuan_image_3_moe": MORE_THAN_TEXT,
    "internlm": NOWHERE,
    "internlm2": NOWHERE,
    "kimi_k2": f"{LATENT} .*{CODE}",
    "kimi_k3": f"{MORE_THAN_TEXT} .*{CODE}",
    "laguna": EXPERTS,
    "lfm2": RECURRENT,
    "llama4": MORE_THAN_TEXT,
    "llava": MORE_THAN_TEXT,
    "mimo_v2_flash": EXPERTS,
    "minicpm3": LATENT,
    "minicpmv4_6": MORE_THAN_TEXT,
    "minimax_m1": f"{EXPERTS} .*{CODE}",
    "minimax_m2": EXPERTS,
    "minimax_m3": EXPERTS,
    "mllama": MORE_THAN_TEXT,
    "molmo": CODE,
    "muse_glimmer": MORE_THAN_TEXT,
    "nemotron_h": RECURRENT,
    "orion": CODE,
    "phi3_v": f"{MORE_THAN_TEXT} .*{CODE}",
    "phi3small": CODE,
    "phimoe": EXPERTS,
    "qwen": CODE,
    "qwen2_5_vl": MORE_THAN_TEXT,
    "qwen2_vl": MORE_THAN_TEXT,
    "qwen3_5": MORE_THAN_TEXT,
    "qwen3_5_moe": MORE_THAN_TEXT,
    "qwen3_5_moe_text": "which has layers of the kind 'linear_attention'",
    "qwen3_next": "which has layers of the kind 'linear_attention'",
    "qwen3_vl": MORE_THAN_TEXT,
    "qwen3_vl_moe": MORE_THAN_TEXT,
    "sparsellama": CODE,
    "stablelm_epoch": CODE,
    "step3p7": EXPERTS,
    "xverse": CODE,
}
# gpt_neox has nothing that tells; it is refused by its name alone.


@pytest.mark.reference
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in REFUSED])
def test_a_published_config_is_read_as_transformers_reads_it(name: str) -> None:
    data = CONFIGS[name]
    assert differences(read_config(data).config, transformers_config(data)) == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_config_that_cannot_be_honoured_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ArtifactError, match=REFUSED[name]):
        read_config(CONFIGS[name])


@pytest.mark.parametrize("model_type", OTHERS)
def test_a_published_config_of_another_family_is_refused_with_what_it_has(model_type: str) -> None:
    reason = REASONS.get(model_type, f"model_type is '{model_type}'; supported")
    with pytest.raises(ArtifactError, match=reason):
        read_config(OTHERS[model_type])
