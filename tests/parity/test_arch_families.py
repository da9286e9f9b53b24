"""Every family and rotary scaling, as a folder and as a GGUF file, computes what transformers computes in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from checkpoints import of_family, tiny_config, write_gguf, write_hf_folder
from llorch_serve.session import DecoderSession
from tiny_exports import all_logits, export_tiny, open_tiny, random_ids
from tolerances import FP32_LOGITS, STEPWISE_LOGITS

TOKENS = 128
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SHORT = [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0]
LONG = [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.25,
    "logits_scaling": 0.5,
}
# Each row: what must be exact, with enough tokens and weights that leaving it out would show.
HF: dict[str, dict[str, Any]] = {
    "yarn": {"rope_scaling": YARN},
    "yarn by type": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "yarn in rope_parameters": {"rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 500000.0}},
    "yarn, attention factor 1": {"rope_scaling": {**YARN, "attention_factor": 1.0}},
    "yarn, attention factor": {"rope_scaling": {**YARN, "attention_factor": 1.5}},
    "yarn, mscale": {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.4}},
    "yarn, mscale alone": {"rope_scaling": {**YARN, "mscale": 0.7}},
    "yarn, betas": {"rope_scaling": {**YARN, "beta_fast": 6.0, "beta_slow": 0.5}},
    "yarn, not truncated": {"rope_scaling": {**YARN, "truncate": False, "beta_fast": 6.0}},
    "yarn, original beside": {
        "original_max_position_embeddings": 32,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    },
    "yarn, original by default": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "dynamic by type": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "longrope, all short": {
        "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 128, "factor": 4.0},
    },
    "heads of 8": {"head_dim": 8},
    "heads of 24": {"head_dim": 24},
    "heads of 40, one kv head": {"head_dim": 40, "num_key_value_heads": 1},
    "mistral": of_family("mistral", sliding_window=None),
    "mistral, window": of_family("mistral", sliding_window=9),
    "mistral, window of 1": of_family("mistral", sliding_window=1),
    "mistral, window beyond the context": of_family("mistral", sliding_window=128),
    "mistral, window by default": of_family("mistral"),
    "qwen2": of_family("qwen2"),
    "qwen2, tied, one kv head": of_family("qwen2", tie_word_embeddings=True, num_key_value_heads=1),
    "qwen2, window off": of_family("qwen2", use_sliding_window=False, sliding_window=9, max_window_layers=1),
    "qwen2, window in later layers": of_family(
        "qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen2, window in all layers": of_family(
        "qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=0
    ),
    "qwen2, window by layer_types": of_family(
        "qwen2",
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen2, yarn": of_family("qwen2", rope_scaling=YARN),
    "qwen3": of_family("qwen3"),
    "qwen3, wide heads": of_family("qwen3", head_dim=32),
    "qwen3, heads of 128 by default": of_family("qwen3", head_dim=None),
    "qwen3, heads of 24": of_family("qwen3", head_dim=24),
    "qwen3, bias": of_family("qwen3", attention_bias=True),
    "qwen3, window and yarn": of_family(
        "qwen3", use_sliding_window=True, sliding_window=9, max_window_layers=1, rope_scaling=YARN
    ),
    "smollm3": of_family("smollm3", num_hidden_layers=5),
    "smollm3, interval": of_family("smollm3", no_rope_layer_interval=2),
    "smollm3, layers": of_family("smollm3", no_rope_layers=[0, 1]),
    "smollm3, heads of 24": of_family("smollm3", no_rope_layers=[0, 1], head_dim=24),
    "smollm3, biases, tied by default": of_family(
        "smollm3", no_rope_layer_interval=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=None
    ),
    "smollm3, window where there is no rope": of_family(
        "smollm3", no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=9
    ),
    "granite": of_family("granite", **GRANITE),
    "granite, multipliers by default": of_family("granite"),
    "granite, tied, biases": of_family(
        "granite", **GRANITE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "phi3": of_family("phi3"),
    "phi3, window": of_family("phi3", sliding_window=9),
    "phi3, half rotated": of_family("phi3", head_dim=None, partial_rotary_factor=0.5),
    "phi3, three quarters rotated": of_family("phi3", head_dim=None, partial_rotary_factor=0.75),
    "phi3, heads of 64, three quarters rotated": of_family(
        "phi3", hidden_size=256, head_dim=None, partial_rotary_factor=0.75
    ),
    "phi3, longrope, all short": of_family(
        "phi3",
        max_position_embeddings=256,
        original_max_position_embeddings=128,
        rope_scaling={"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
    ),
    "phi3, longrope, partial": of_family(
        "phi3",
        head_dim=None,
        partial_rotary_factor=0.75,
        max_position_embeddings=256,
        original_max_position_embeddings=128,
        rope_scaling={"type": "longrope", "short_factor": SHORT[:6], "long_factor": LONG[:6]},
    ),
}


def reference(folder: Path, ids: list[int], **place: Any) -> npt.NDArray[np.float32]:
    """Return transformers' logits of every position."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager", **place
    )
    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = model.eval()(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return logits


def stepwise(session: DecoderSession, ids: list[int]) -> npt.NDArray[np.float32]:
    """Return logits of every position: a prefill of 20, a chunk of 30, then one token at a time."""
    parts = [
        session.prefill(0, ids[:20], 0, range(20)).copy(),
        session.prefill(0, ids[20:50], 20, range(30)).copy(),
    ]
    parts += [session.decode([ids[p]], [p + 1]).copy() for p in range(50, len(ids))]
    return np.concatenate(parts)


@pytest.mark.reference
@pytest.mark.parametrize("name", HF)
def test_a_folder_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    folder = write_hf_folder(tmp_path / "model", HF[name])
    session = open_tiny(export_tiny(folder, tmp_path / "artifact"))
    ids = random_ids(TOKENS)
    full = session.prefill(1, ids, 0, range(TOKENS)).copy()
    np.testing.assert_allclose(full, reference(folder, ids), atol=FP32_LOGITS, rtol=0)
    np.testing.assert_allclose(stepwise(session, ids), full, atol=STEPWISE_LOGITS, rtol=0)


# The rows that llama.cpp's converter can store, under the architecture it stores them as.
GGUF = [
    "yarn",
    "yarn, betas",
    "heads of 24",
    "qwen2",
    "qwen2, tied, one kv head",
    "qwen2, yarn",
    "qwen3",
    "qwen3, wide heads",
    "qwen3, heads of 24",
    "smollm3",
    "granite",
    "granite, tied, biases",
    "phi3",
    "phi3, window",
    "phi3, half rotated",
    "phi3, longrope, all short",
    "phi3, longrope, partial",
]


@pytest.mark.reference
@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_file_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    """The folder is only there for transformers; the file holds the same weights in llama.cpp's names and order."""
    metadata = {"llama.rope.scaling.yarn_beta_fast": 6.0, "llama.rope.scaling.yarn_beta_slow": 0.5}
    source = write_gguf(tmp_path / "m.gguf", HF[name], metadata=metadata if "betas" in name else None)
    ids = random_ids(TOKENS)
    expected = reference(write_hf_folder(tmp_path / "model", HF[name]), ids)
    session = open_tiny(export_tiny(source, tmp_path / "artifact"))
    np.testing.assert_allclose(session.prefill(1, ids, 0, range(TOKENS)), expected, atol=FP32_LOGITS, rtol=0)
    np.testing.assert_allclose(stepwise(session, ids), expected, atol=FP32_LOGITS, rtol=0)
