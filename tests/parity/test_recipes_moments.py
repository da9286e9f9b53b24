"""Second moments are those of transformers' own modules, and gptq on them beats affine on the model's outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import numpy_llama
from checkpoints import tiny_config, tiny_llama_config, tiny_weights, write_hf_folder
from llorch_export.checkpoint.source import open_checkpoint
from llorch_export.options import Rule
from llorch_export.reference import Reference
from llorch_export.transform import moments as module
from llorch_export.transform.moments import second_moments
from llorch_serve.errors import UsageError
from llorch_serve.fidelity import DivergenceSum
from llorch_serve.text import Tokenizer
from tiny_exports import all_logits, export_tiny, random_ids, silent

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
        for name, wanted in expected.items():
            weight = "model.embed_tokens.weight" if tied and name == "lm_head" else f"{name}.weight"
            np.testing.assert_allclose(
                moments.of(weight), wanted, atol=RELATIVE * np.abs(wanted).max(), err_msg=name
            )


def test_gptq_diverges_less_than_affine_at_the_same_size(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("Paris is the capital of France, and Rome of Italy. " * 40)
    tokenizer = Tokenizer.load(export_tiny(source, tmp_path / "fp32").tokenizer_path)
    ids = list(tokenizer.encode(text.read_text(), add_special_tokens=True))[:100]
    exact = numpy_llama.forward(tiny_config(), tiny_weights(tiny_llama_config()), ids).astype(np.float32)

    def divergence(tag: str, **options: object) -> tuple[float, int]:
        artifact = export_tiny(source, tmp_path / tag, precision="int4", **options)
        figures = DivergenceSum()
        figures.add(exact, all_logits(artifact, ids))
        return figures.result().kl, (artifact.folder / "model.onnx.data").stat().st_size

    affine, gptq = divergence("a"), divergence("g", quantizer="gptq", calibration=text)
    assert affine[1] == gptq[1]
    assert gptq[0] < 0.7 * affine[0]
    rule = Rule(("*.down_proj",), quantizer="gptq")
    assert divergence("r", rules=(rule,), calibration=text)[0] != affine[0]


def test_a_calibration_text_comes_with_gptq_and_with_nothing_else(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("Paris is the capital of France. " * 9)
    rule = Rule(("*.down_proj",), quantizer="gptq")
    for options in ({"quantizer": "gptq"}, {"rules": (rule,)}):
        with pytest.raises(
            UsageError, match="--quantizer gptq need figures measured on a text; add --calibration"
        ):
            export_tiny(source, tmp_path / "a", precision="int4", **options)
    for options in ({}, {"rules": (Rule(("*.down_proj",), precision="int8"),)}):
        with pytest.raises(UsageError, match="has no effect on this export"):
            export_tiny(
                source, tmp_path / "a", precision="int4", kv_dtype="float32", calibration=text, **options
            )
    artifact = export_tiny(source, tmp_path / "a", precision="int4", rules=(rule,), calibration=text)
    assert artifact.manifest.recipe.calibration is not None
    again = export_tiny(source, tmp_path / "b", precision="int4", rules=(rule,), calibration=text)
    data = [(a.folder / "model.onnx.data").read_bytes() for a in (artifact, again)]
    assert data[0] == data[1]
