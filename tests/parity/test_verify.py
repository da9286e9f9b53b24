"""``verify`` accepts the model it was given and nothing else, whatever the checkpoint is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from llorch_export.adapter.choice import AdapterChoice
from llorch_export.source.open import open_checkpoint
from llorch_export.verify.divergence import Verification, verify
from llorch_export.verify.reference import Reference
from llorch_serve.bench.workload import sample_text
from llorch_serve.errors import ArtifactError
from support.builders.adapters import write_adapter
from support.builders.checkpoints import (
    Weights,
    tiny_config,
    tiny_llama_config,
    tiny_weights,
    write_gguf,
    write_hf_folder,
)
from support.builders.tiny_exports import export_tiny, random_ids, silent
from support.oracles import numpy_llama
from tolerances import KL_FP32, NUMPY_LOGITS

pytestmark = pytest.mark.reference

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def text(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the sample text, except where a test asks for ``whole_text``."""
    if "whole_text" not in request.fixturenames:
        monkeypatch.setattr("llorch_export.verify.sample_tokens.sample_text", lambda: sample_text()[:800])


@pytest.fixture
def whole_text() -> None:
    """Marks a test that reads all of the sample text."""


def check(artifact: Path, source: Path) -> Verification:
    return verify(artifact, str(source), silent)


def only_unknown_tokens(folder: Path) -> None:
    """Replace the tokenizer by one that knows no word of the sample text."""
    vocabulary = {"<unk>": 0} | {f"w{i}": i for i in range(1, 512)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.usefixtures("whole_text")
def test_an_fp32_artifact_passes_and_names_its_oracle(tmp_path: Path) -> None:
    import torch
    import transformers

    source = write_hf_folder(tmp_path / "model")
    export_tiny(source, tmp_path / "out")
    told: list[tuple[int, int]] = []
    found = verify(tmp_path / "out", str(source), lambda phase, done, total: told.append((done, total)))
    assert found.passed
    assert 0 <= found.kl < KL_FP32
    assert found.limit == KL_FP32
    assert found.top1 == 1.0
    assert found.max_abs < 1e-3
    assert found.same_source
    assert (found.text, found.window) == ("sample", 128)
    assert found.tokens == told[0][1] == sum(done for done, _ in told) > 2000
    assert found.oracle == f"transformers {transformers.__version__}, torch {torch.__version__}, float32"


@pytest.mark.parametrize(
    ("precision", "head"), [("int8", "int8"), ("int4", "int4"), ("int4", "int8"), ("fp32", "int8")]
)
def test_quantised_artifacts_pass_their_own_limit_and_not_that_of_fp32(
    tmp_path: Path, precision: str, head: str
) -> None:
    source = write_hf_folder(tmp_path / "model")
    artifact = export_tiny(source, tmp_path / "out", precision=precision, head_precision=head)
    found = check(tmp_path / "out", source)
    assert found.passed
    assert found.limit == artifact.manifest.recipe.kl_limit
    assert KL_FP32 < found.kl < found.limit


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_another_weight_in_the_source_fails(tmp_path: Path, name: str) -> None:
    def edit(weights: Weights) -> None:
        weights[name] *= np.float32(1.5)

    export_tiny(write_hf_folder(tmp_path / "model"), tmp_path / "out")
    found = check(tmp_path / "out", write_hf_folder(tmp_path / "other", edit=edit))
    assert not found.passed
    assert found.kl > KL_FP32
    assert not found.same_source


def test_a_damaged_weight_in_the_artifact_fails(tmp_path: Path) -> None:
    """Same size, same manifest: only the numbers tell."""
    source = write_hf_folder(tmp_path / "model")
    export_tiny(source, tmp_path / "out")
    data = tmp_path / "out" / "model.onnx.data"
    whole = np.fromfile(data, np.float32)
    whole[len(whole) // 2 :] *= np.float32(1.1)
    whole.tofile(data)
    found = check(tmp_path / "out", source)
    assert not found.passed
    assert found.same_source


def test_the_same_weights_from_elsewhere_pass_and_say_so(tmp_path: Path) -> None:
    export_tiny(write_hf_folder(tmp_path / "model"), tmp_path / "out")
    found = check(tmp_path / "out", write_hf_folder(tmp_path / "sharded", shards=3))
    assert found.passed
    assert not found.same_source


def test_random_ids_stand_in_where_the_tokenizer_does_not_know_the_text(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    only_unknown_tokens(source)
    export_tiny(source, tmp_path / "out")
    first, second = check(tmp_path / "out", source), check(tmp_path / "out", source)
    assert (first.text, first.tokens) == ("random", 512)
    assert first.passed
    assert first == second


def test_windows_are_as_long_as_the_artifacts_context(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    export_tiny(source, tmp_path / "out", max_context=48)
    found = check(tmp_path / "out", source)
    assert found.window == 48
    assert found.passed


def test_long_windows_run_in_chunks_with_their_past(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model", {"max_position_embeddings": 640})
    only_unknown_tokens(source)  # 512 random ids: one window, two chunks
    export_tiny(source, tmp_path / "out")
    found = check(tmp_path / "out", source)
    assert (found.window, found.tokens) == (640, 512)
    assert found.passed


def test_another_vocabulary_is_refused_with_both_sizes(tmp_path: Path) -> None:
    export_tiny(write_hf_folder(tmp_path / "model"), tmp_path / "out")
    other = write_hf_folder(tmp_path / "other", {"vocab_size": 640})
    with pytest.raises(ArtifactError, match=r"512 .*640"):
        check(tmp_path / "out", other)


def test_a_model_that_transformers_refuses_is_told_in_one_line(tmp_path: Path) -> None:
    shape = {"hidden_size": 56, "num_attention_heads": 6, "head_dim": 16}
    source = write_hf_folder(tmp_path / "model", shape)
    export_tiny(source, tmp_path / "out")
    with pytest.raises(ArtifactError, match=r"transformers cannot load .* not a multiple") as caught:
        check(tmp_path / "out", source)
    assert "\n" not in str(caught.value)


FOLDERS: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_scaling": LLAMA3},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_every_kind_pass(tmp_path: Path, name: str) -> None:
    source = write_hf_folder(tmp_path / "model", FOLDERS[name])
    export_tiny(source, tmp_path / "out")
    assert check(tmp_path / "out", source).passed


GGUFS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"config_overrides": {"attention_bias": True, "mlp_bias": True}},
    "tied": {"config_overrides": {"tie_word_embeddings": True}},
    "wide heads": {"config_overrides": {"head_dim": 32}},
    "theta": {"config_overrides": {"rope_theta": 500000.0}},
    "linear": {"config_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}},
    "rope_freqs": {"extra": {"rope_freqs.weight": np.linspace(1, 6, 8, dtype=np.float32)}},
    "llama3 as rope_freqs": {"config_overrides": {"rope_scaling": LLAMA3}},
    "Q8_0": {"weight_type": "Q8_0"},
    "Q4_1": {"weight_type": "Q4_1"},
    "F16": {"weight_type": "F16"},
    "BF16": {"weight_type": "BF16"},
}


@pytest.mark.parametrize("name", GGUFS)
def test_gguf_files_of_every_kind_pass(tmp_path: Path, name: str) -> None:
    source = write_gguf(tmp_path / "model.gguf", **GGUFS[name])
    export_tiny(source, tmp_path / "out")
    found = check(tmp_path / "out", source)
    assert found.passed
    assert found.kl < KL_FP32


@pytest.mark.parametrize("name", ["biases", "tied", "wide heads", "theta", "linear", "llama3 as rope_freqs"])
def test_the_oracle_of_a_gguf_is_right_by_definition(tmp_path: Path, name: str) -> None:
    """transformers' loader leaves parts of a GGUF out; the oracle must not agree with an exporter that does
    too.
    """
    overrides = GGUFS[name]["config_overrides"]
    reference = Reference(open_checkpoint(str(write_gguf(tmp_path / "model.gguf", overrides))))
    ids = random_ids(128)
    expected = numpy_llama.forward(
        tiny_config(**overrides), tiny_weights(tiny_llama_config(**overrides)), ids
    )
    np.testing.assert_allclose(reference.logits(ids), expected, atol=NUMPY_LOGITS, rtol=0)


def test_an_adapter_is_verified_against_its_own_merge(tmp_path: Path) -> None:
    """The reference adds the adapter by torch; without ``--lora`` the same artifact is another model."""
    source = write_hf_folder(tmp_path / "model")
    write_adapter(
        tmp_path / "lora", tiny_llama_config(), use_rslora=True, alpha_pattern={"layers.1.mlp.down_proj": 2}
    )
    artifact = export_tiny(source, tmp_path / "artifact", lora=(AdapterChoice(tmp_path / "lora"),))
    result = verify(artifact.folder, str(source), silent, lora=(AdapterChoice(tmp_path / "lora"),))
    assert result.kl < KL_FP32
    assert result.same_source
    without = verify(artifact.folder, str(source), silent)
    assert without.kl > 1000 * KL_FP32
    assert not without.same_source
