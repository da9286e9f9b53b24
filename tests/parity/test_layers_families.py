"""``verify --layers`` follows the graph of every family: each passes at every stage that the graph and it
share.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from llorch_export.verify.layers.stages import Kind
from llorch_export.verify.layers.verify import verify_layers
from support.builders import arch_rows
from support.builders.checkpoints import tiny_llama_config, write_hf_folder
from support.builders.tiny_exports import export_tiny, silent

pytestmark = pytest.mark.reference


@pytest.mark.parametrize(
    "row",
    arch_rows.usual_first(
        [
            "yarn, attention factor",
            "heads of 24",
            "mistral, window",
            "qwen2, window in later layers",
            "qwen3, heads of 24",
            "smollm3, layers",
            "granite, tied, biases",
            "phi3, half rotated",
            "gemma, tied, one kv head",
            "gemma2",
            "gemma3",
            "olmo2",
            "olmo3",
            "exaone4",
            "glm4",
            "arcee, biases, tied",
            "hunyuan, alpha",
            "cohere2",
            "starcoder2",
            "stablelm, parallel, biases",
            "phi",
            "nemotron",
            "qwen2_moe, one layer without",
            "granitemoe",
            "gpt_oss",
            "apertus",
            "ministral3",
            "minicpm",
        ],
        only=("gemma3", "olmo2", "cohere2", "phi", "qwen2_moe, one layer without", "gpt_oss"),
    ),
)
def test_every_family_passes(tmp_path: Path, row: str) -> None:
    source = write_hf_folder(tmp_path / "model", arch_rows.HF[row])
    export_tiny(source, tmp_path / "out")
    found = verify_layers(tmp_path / "out", str(source), silent)
    assert found.passed, found.first_departing
    config = tiny_llama_config(**arch_rows.HF[row])
    missing = {Kind.LLAMA_CPP, *([Kind.RESIDUAL] if config.form.parallel else [])}
    if not config.experts:
        missing |= {Kind.ROUTER, Kind.EXPERTS}
    elif row in ("granitemoe", "gpt_oss"):
        missing.add(Kind.SWIGLU)  # inside the experts alone
    assert {stage.kind for stage in found.stages} == set(Kind) - missing
