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
}


@pytest.mark.reference
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in REFUSED])
def test_a_published_config_is_read_as_transformers_reads_it(name: str) -> None:
    data = CONFIGS[name]
    assert differences(read_config(data).config, transformers_config(data)) == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_config_that_cannot_be_honoured_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ArtifactError, match=REFUSED[name]):
        read_config(CONFIGS[name])
