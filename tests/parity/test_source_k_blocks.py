"""Weights in K blocks through ``--precision source``: the artifact stays within the recipe's limit of those
very blocks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from llorch_export.recipes.kl_limits import KL_LIMIT
from llorch_export.verify.divergence import verify
from llorch_serve.bench.workload import sample_text
from support.builders import gguf_from_folder, trained_llama
from support.builders.checkpoints import write_gguf
from support.builders.tiny_exports import export_tiny, silent
from support.oracles.gguf_blocks import K_TYPES, dequantised, encoded

pytestmark = pytest.mark.reference

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512}
HALF_STEP = {
    "Q4_K": 0.5 / 15,
    "Q5_K": 0.5 / 31,
    "Q6_K": 0.5 / 31,
}  # of a sub-block's range, or of its magnitude


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "small"
    trained_llama.write(folder)
    return folder


@pytest.mark.parametrize("kind", K_TYPES)
def test_encoded_weights_are_within_half_a_step_or_so(kind: str) -> None:
    weights = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
    weights[1, :40] = 0
    weights[2] = 0
    weights[3] = np.abs(weights[3])
    blocks = weights.reshape(-1, 32)
    error = np.abs(dequantised(kind, encoded(kind, weights)).reshape(-1, 32) - blocks).max(1)
    reach = blocks.max(1) - blocks.min(1) if kind != "Q6_K" else np.abs(blocks).max(1)
    # Steps and offsets are rounded to 6 or 8 bits of the largest of 256 weights.
    assert (error <= HALF_STEP[kind] * reach + 0.02 * np.abs(weights).max()).all()
    assert np.abs(dequantised(kind, encoded(kind, weights))[2]).max() == 0


@pytest.mark.parametrize("kind", K_TYPES)
def test_blocks_of_weights_are_carried_over_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("llorch_export.verify.sample_tokens.sample_text", lambda: sample_text()[:800])

    def blocks(name: str, rows: int, columns: int) -> tuple[str, npt.NDArray[np.uint8]]:
        values = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
        return kind, encoded(kind, values * np.float32(columns**-0.5))

    source = write_gguf(tmp_path / "m.gguf", SHAPE, blocks=blocks)
    export_tiny(source, tmp_path / "a", precision="source")
    found = verify(tmp_path / "a", str(source), silent)
    assert found.limit == KL_LIMIT["source"]
    assert 0 < found.kl <= found.limit


@pytest.mark.slow
@pytest.mark.parametrize("kind", K_TYPES)
def test_blocks_of_a_trained_model_are_carried_over_within_the_limit(
    tmp_path: Path, small_llama: Path, kind: str
) -> None:
    source = gguf_from_folder.convert(small_llama, tmp_path / "m.gguf", kind)
    export_tiny(source, tmp_path / "a", precision="source")
    found = verify(tmp_path / "a", str(source), silent)
    assert found.text == "sample"
    assert 0 < found.kl <= found.limit == KL_LIMIT["source"]
