"""The graph for onnxruntime-genai gives the logits of llorch's own: prompts, steps, further turns and
batches.

The oracle is the artifact's own session, which other tests hold against transformers; the runtime is
onnxruntime, fed as onnxruntime-genai feeds it. ``ci/test-genai`` runs onnxruntime-genai itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.options import Rule
from llorch_serve.artifact.folder import Artifact
from support.builders.arch_rows import HF
from support.builders.checkpoints import of_family, write_gguf, write_hf_folder
from support.builders.tiny_exports import export_tiny, open_tiny, random_ids
from support.oracles.genai_feeding import GenaiFeeder
from tolerances import STEPWISE_LOGITS

Export = Callable[..., Artifact]
PROMPT = 21
FAMILIES = [
    "yarn",
    "heads of 8",
    "mistral, window",
    "gemma2",
    "gemma3",
    "phi",
    "qwen2, window in later layers",
    "qwen2, tied, one kv head",
    "qwen3",
    "smollm3",
    "granite",
    "phi3",
]


@pytest.fixture
def exported(tmp_path: Path) -> Export:
    def export(config: dict[str, Any] | None = None, **options: Any) -> Artifact:
        source = write_hf_folder(tmp_path / "model", config or {})
        return export_tiny(source, tmp_path / "artifact", interop="genai", **options)

    return export


def check(artifact: Artifact) -> None:
    """Compare a prompt, four steps, a further turn of five tokens and a step."""
    ids = random_ids(PROMPT + 10)
    own, guest = open_tiny(artifact), GenaiFeeder(artifact.folder)
    ends = [PROMPT, *range(PROMPT + 1, PROMPT + 5), PROMPT + 9, PROMPT + 10]
    for start, end in zip([0, *ends], ends, strict=False):
        expected = own.prefill(0, ids[start:end], start)
        found = guest.feed(ids[start:end])
        np.testing.assert_allclose(found, expected, atol=STEPWISE_LOGITS, rtol=0, err_msg=f"{start}:{end}")


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_sequence_has_the_logits_of_llorchs_own_graph(exported: Export, precision: str) -> None:
    check(exported(precision=precision))


@pytest.mark.parametrize(
    "options",
    [
        {"activations": "row"},
        {"activations": "static", "transforms": ("rotate",)},
        {"rules": (Rule(("lm_head",), activations="row"),)},
    ],
)
def test_layers_in_whole_bytes_are_the_same_in_both(exported: Export, options: dict[str, Any]) -> None:
    check(exported(precision="int8", **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_does(exported: Export, family: str) -> None:
    check(exported(HF[family]))


def test_so_does_a_gguf_file_whose_blocks_are_kept(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", {"hidden_size": 64}, weight_type="Q8_0")
    check(export_tiny(source, tmp_path / "artifact", precision="source", interop="genai"))


@pytest.mark.parametrize("family", ["llama", "smollm3"])
def test_prompts_of_different_lengths_share_a_batch(exported: Export, family: str) -> None:
    artifact = exported(of_family(family, head_dim=8) if family == "smollm3" else None)
    prompts = [random_ids(9, seed=1), random_ids(17, seed=2), random_ids(3, seed=3)]
    own, guest = open_tiny(artifact, slots=3), GenaiFeeder(artifact.folder, batch=3)
    found = guest.feed(*prompts)
    for slot, prompt in enumerate(prompts):
        np.testing.assert_allclose(found[slot], own.prefill(slot, prompt, 0)[0], atol=STEPWISE_LOGITS, rtol=0)
    lengths = [len(prompt) for prompt in prompts]
    for token in random_ids(4, seed=4):
        lengths = [length + 1 for length in lengths]
        expected = own.decode([token, token + 1, token], lengths)
        np.testing.assert_allclose(
            guest.feed([token], [token + 1], [token]), expected, atol=STEPWISE_LOGITS, rtol=0
        )
