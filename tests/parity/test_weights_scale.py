"""Hidden states that half precision cannot hold are no reason for NaN: every precision computes sums in
float32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llorch_export.recipes.kl_limits import KL_LIMIT
from llorch_serve.fidelity.divergence import DivergenceSum
from support.builders.checkpoints import Weights, write_hf_folder
from support.builders.tiny_exports import all_logits, export_tiny, random_ids
from tolerances import FP32_LOGITS

pytestmark = pytest.mark.reference

HALF_PRECISION_MAX = 65504


def enlarge(weights: Weights) -> None:
    for name, value in weights.items():
        if "o_proj" in name or "down_proj" in name:
            value *= np.float32(1e5)


def test_a_residual_stream_beyond_half_precision_is_exact(tmp_path: Path) -> None:
    import torch
    import transformers

    source = write_hf_folder(tmp_path / "model", edit=enlarge)
    ids = random_ids(40)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.inference_mode():
        output = model(torch.tensor([ids]), output_hidden_states=True)
    assert max(float(states.abs().max()) for states in output.hidden_states[:-1]) > 1.07 * HALF_PRECISION_MAX
    expected = output.logits[0].numpy()
    found = all_logits(export_tiny(source, tmp_path / "fp32"), ids)
    np.testing.assert_allclose(found, expected, atol=FP32_LOGITS, rtol=0)
    total = DivergenceSum()
    total.add(expected, all_logits(export_tiny(source, tmp_path / "int8", precision="int8"), ids))
    assert total.result().kl < KL_LIMIT["int8"]
