"""Tiny models with the settings of published ones are exported as transformers computes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.config.hf import read_config
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import tiny_config, write_hf_folder
from support.builders.shrunk_configs import shrunk
from support.builders.tiny_exports import export_tiny, open_tiny, random_ids
from support.oracles.stepwise import reference
from tolerances import FP32_LOGITS

PUBLISHED = Path(__file__).parent.parent / "data" / "published" / "configs.jsonl"
TOKENS = 96
# One of each kind at every run: the rest takes minutes.
USUAL = (
    "HuggingFaceTB__SmolLM3-3B",
    "Qwen__Qwen2.5-0.5B",
    "ibm-granite__granite-3.3-8b-instruct",
    "meta-llama__Llama-3.2-3B-Instruct",
    "microsoft__Phi-4-mini-instruct",
    "mistralai__Mistral-7B-v0.1",
)


def _distinct() -> dict[str, dict[str, Any]]:
    """Return the accepted configs, shrunk, but of those that become the same only the first."""
    found: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    rows = [json.loads(line) for line in PUBLISHED.read_text(encoding="utf-8").splitlines()]
    for row in sorted(rows, key=lambda row: row["name"] not in USUAL):
        small = shrunk(row["config"])
        small.pop("quantization_config", None)
        try:
            key = repr((read_config(small).config, sorted(small)))
        except ArtifactError:
            continue
        if key not in seen:
            seen.add(key)
            found[row["name"]] = small
    return found


CONFIGS = _distinct()


@pytest.mark.reference
@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_a_tiny_model_with_published_settings_computes_what_transformers_computes(
    tmp_path: Path, name: str
) -> None:
    data = CONFIGS[name]
    as_overrides = {**dict.fromkeys(tiny_config()), **data}
    folder = write_hf_folder(tmp_path / "model", as_overrides)
    (folder / "config.json").write_text(json.dumps(data), encoding="utf-8")  # with its nulls
    ids = random_ids(TOKENS)
    session = open_tiny(export_tiny(folder, tmp_path / "artifact", max_context=128))
    found = session.prefill(0, ids, 0, range(TOKENS))
    np.testing.assert_allclose(found, reference(folder, ids), atol=FP32_LOGITS, rtol=0)


def test_there_are_enough_published_settings() -> None:
    assert len(CONFIGS) >= 60
    assert set(USUAL) <= set(CONFIGS)
