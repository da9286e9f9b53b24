"""Second moments are those of transformers' own modules, and gptq on them beats affine on the model's
outputs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from llorch_export.calibration.measurements import BUNDLED_TEXT
from llorch_export.options import Rule
from llorch_export.source.open import open_checkpoint
from llorch_export.transform import moments as module
from llorch_export.transform.moments import second_moments
from llorch_export.verify.reference import Reference
from llorch_serve.errors import UsageError
from llorch_serve.fidelity.divergence import DivergenceSum
from llorch_serve.text.tokenizer import Tokenizer
from support.builders.checkpoints import tiny_config, tiny_llama_config, tiny_weights, write_hf_folder
from support.builders.tiny_exports import all_logits, export_tiny, random_ids, silent
from support.oracles import numpy_llama

RELATIVE = 1e-4


@pytest.mark.reference
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("budget", [1, 2**30])
def test_moments_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, tied: bool
) -> None:
    """With a budget of one byte each input is measured in a run of its own."""
    import torch

    monkeypatch.setattr(module, "WINDOW", 20)
    monkeypatch.setattr(module, "_BUDGET", budget)
    overrides = {"tie_word_embeddings": tied, "attention_bias": True}
    checkpoint = open_checkpoint(str(write_hf_folder(tmp_path / "model", overrides)))
    ids = random_ids(47)
    model = Reference(checkpoint).model
    expected: dict[str, np.ndarray] = {}

    def hook(name: str):  # type: ignore[no-untyped-def]  # torch's own signature
        def add(_layer, inputs) -> None:  # type: ignore[no-untyped-def]
            x = inputs[0].detach().double().reshape(-1, inputs[0].shape[-1])
            expected[name] = expected.get(name, 0) + (x.T @ x).numpy() / len(ids)

        return add

    hooks = [
        layer.register_forward_pre_hook(hook(name))
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    with torch.no_grad():
        for start in range(0, len(ids), 20):
            model(input_ids=torch.tensor([ids[start : start + 20]]))
    for handle in hooks:
        handle.remove()
    with second_moments(checkpoint.config, checkpoint.tensors, ids, silent) as moments:
        assert expected
        for name, wanted in expected.items():
            weight = "model.embed_tokens.weight" if tied and name == "lm_head" else f"{name}.weight"
            np.testing.assert_allclose(
                moments.of(weight), wanted, atol=RELATIVE * np.abs(wanted).max(), err_msg=name
            )


@pytest.mark.parametrize(
    ("precision", "without"), [("int4", {"quantizer": "affine"}), ("int8", {})], ids=["affine", "nearest"]
)
def test_gptq_diverges_less_than_without_at_the_same_size(
    tmp_path: Path, precision: str, without: dict[str, str]
) -> None:
    source = write_hf_folder(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("Paris is the capital of France, and Rome of Italy. " * 40)
    tokenizer = Tokenizer.load(export_tiny(source, tmp_path / "fp32").tokenizer_path)
    ids = list(tokenizer.encode(text.read_text(), add_special_tokens=True))[:100]
    exact = numpy_llama.forward(tiny_config(), tiny_weights(tiny_llama_config()), ids).astype(np.float32)

    def divergence(tag: str, **options: object) -> tuple[float, int]:
        # Level 4 would round activations, by more than 8-bit weights are.
        artifact = export_tiny(source, tmp_path / tag, precision=precision, accuracy_level=0, **options)
        figures = DivergenceSum()
        figures.add(exact, all_logits(artifact, ids))
        return figures.result().kl, (artifact.folder / "model.onnx.data").stat().st_size

    plain, gptq = divergence("p", **without), divergence("g", quantizer="gptq", calibration=text)
    assert plain[1] == gptq[1]
    assert gptq[0] < 0.7 * plain[0]
    rule = Rule(("*.down_proj",), quantizer="gptq")
    assert divergence("r", rules=(rule,), calibration=text, **without)[0] != plain[0]


def test_a_calibration_text_comes_with_gptq_and_with_nothing_else(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("Paris is the capital of France. " * 9)
    rule = Rule(("*.down_proj",), quantizer="gptq")
    for options in ({"quantizer": "gptq"}, {"quantizer": "affine", "rules": (rule,)}):
        with pytest.raises(
            UsageError, match="--quantizer gptq need figures measured on a text; add --calibration"
        ):
            export_tiny(source, tmp_path / "a", precision="int4", **options)
    for options in ({}, {"rules": (Rule(("*.down_proj",), precision="int8"),)}):
        plain = {"precision": "int4", "quantizer": "affine", "kv_dtype": "float32", "calibration": text}
        with pytest.raises(UsageError, match="has no effect on this export"):
            export_tiny(source, tmp_path / "a", **plain, **options)
    artifact = export_tiny(
        source, tmp_path / "a", precision="int4", quantizer="affine", rules=(rule,), calibration=text
    )
    assert artifact.manifest.recipe.calibration is not None


def test_int4_measures_on_the_bundled_text_unasked_and_gives_the_same_bytes_twice(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model", {"tie_word_embeddings": False})
    found = [export_tiny(source, tmp_path / name, precision="int4", head_precision="int4") for name in "ab"]
    recipe = found[0].manifest.recipe
    assert recipe.quantizer == "gptq"
    assert recipe.calibration is not None
    assert recipe.calibration.sha256 == hashlib.sha256(BUNDLED_TEXT.read_bytes()).hexdigest()
    data = [{path.name: path.read_bytes() for path in sorted(a.folder.iterdir())} for a in found]
    assert data[0] == data[1]
    searched = export_tiny(
        source, tmp_path / "c", precision="int4", head_precision="int4", quantizer="affine"
    )
    assert searched.manifest.recipe.quantizer == "affine"
    assert (searched.folder / "model.onnx.data").read_bytes() != data[0]["model.onnx.data"]


@pytest.mark.parametrize("threads", [1, 2])
def test_matrices_are_turned_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(module, "usable_cpus", lambda: threads)
    checkpoint = open_checkpoint(str(write_hf_folder(tmp_path / "model")))
    ids, turned = random_ids(30), []

    def turn(moment: np.ndarray) -> np.ndarray:
        turned.append(moment)
        return 2 * moment

    with (
        second_moments(checkpoint.config, checkpoint.tensors, ids, silent) as plain,
        second_moments(checkpoint.config, checkpoint.tensors, ids, silent, turn) as doubled,
    ):
        layer = "model.layers.0.self_attn"
        for weight in ("q_proj", "k_proj", "o_proj"):
            expected = 2 * plain.of(f"{layer}.{weight}.weight")
            np.testing.assert_array_equal(doubled.of(f"{layer}.{weight}.weight"), expected)
    assert len(turned) == 4 * checkpoint.config.num_hidden_layers + 1  # q, k, v share one; gate and up; head
