"""Every family and rotary scaling, as a folder and as a GGUF file, computes what transformers computes in
fp32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llorch_serve.errors import ArtifactError
from support.builders.arch_rows import GGUF, HF, usual_first
from support.builders.checkpoints import Weights, write_gguf, write_hf_folder
from support.builders.tiny_exports import export_tiny, open_tiny, random_ids
from support.oracles.stepwise import check_steps, reference
from tolerances import FP32_LOGITS, STEPWISE_LOGITS

TOKENS = 128


@pytest.mark.reference
@pytest.mark.parametrize("name", usual_first(HF))
def test_a_folder_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    folder = write_hf_folder(tmp_path / "model", HF[name])
    session = open_tiny(export_tiny(folder, tmp_path / "artifact"))
    ids = random_ids(TOKENS)
    full = session.prefill(1, ids, 0, range(TOKENS)).copy()
    np.testing.assert_allclose(full, reference(folder, ids), atol=FP32_LOGITS, rtol=0)
    check_steps(session, ids, full, STEPWISE_LOGITS)


@pytest.mark.reference
def test_each_layer_has_its_own_factors_of_the_activation(tmp_path: Path) -> None:
    def drawn(weights: Weights) -> None:
        rng = np.random.default_rng(5)
        for name in [name for name in weights if ".act_fn." in name]:
            value = rng.uniform(-1.5, -0.5) if name.endswith("eps") else rng.normal()
            weights[name] = np.array([value], np.float32)

    folder = write_hf_folder(tmp_path / "model", HF["apertus"], edit=drawn)
    session = open_tiny(export_tiny(folder, tmp_path / "artifact"))
    ids = random_ids(TOKENS)
    full = session.prefill(1, ids, 0, range(TOKENS))
    np.testing.assert_allclose(full, reference(folder, ids), atol=FP32_LOGITS, rtol=0)


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_an_activation_whose_limit_is_not_negative_is_refused(tmp_path: Path, value: float) -> None:
    def wrong(weights: Weights) -> None:
        weights["model.layers.1.mlp.act_fn.eps"] = np.array([value], np.float32)

    folder = write_hf_folder(tmp_path / "model", HF["apertus"], edit=wrong)
    with pytest.raises(ArtifactError, match=r"act_fn.eps .*expected a negative number|NaN or infinity"):
        export_tiny(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe, one layer without", "granitemoe"])
def test_experts_kept_together_give_the_artifact_of_those_kept_one_by_one(tmp_path: Path, name: str) -> None:
    found = [
        export_tiny(
            write_hf_folder(tmp_path / f"model {stacked}", HF[name], stacked_experts=stacked),
            tmp_path / f"artifact {stacked}",
        )
        for stacked in (True, False)
    ]
    hashes = [{entry.path: entry.sha256 for entry in artifact.manifest.files} for artifact in found]
    assert hashes[0] == hashes[1]


@pytest.mark.reference
@pytest.mark.parametrize("name", usual_first(GGUF))
def test_a_gguf_file_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    """The folder is only there for transformers; the file holds the same weights in llama.cpp's names and
    order.
    """
    metadata = {"llama.rope.scaling.yarn_beta_fast": 6.0, "llama.rope.scaling.yarn_beta_slow": 0.5}
    source = write_gguf(tmp_path / "m.gguf", HF[name], metadata=metadata if "betas" in name else None)
    ids = random_ids(TOKENS)
    expected = reference(write_hf_folder(tmp_path / "model", HF[name]), ids)
    session = open_tiny(export_tiny(source, tmp_path / "artifact"))
    np.testing.assert_allclose(session.prefill(1, ids, 0, range(TOKENS)), expected, atol=FP32_LOGITS, rtol=0)
    check_steps(session, ids, expected, FP32_LOGITS)
