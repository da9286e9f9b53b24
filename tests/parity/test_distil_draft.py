"""``examples/distil_draft.py``: layers of a model alone, and what they learn of the whole."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.config import SessionConfig
from llorch_serve.loading.draft import find_draft
from support.builders.checkpoints import write_gguf, write_hf_folder
from support.builders.tiny_exports import export_tiny
from support.harness.scripts import load_script

LAYERS = 4


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("examples/distil_draft.py")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("distil") / "source", {"num_hidden_layers": LAYERS})


@pytest.fixture(scope="module")
def texts() -> torch.Tensor:
    return torch.randint(0, 512, (8, 48), generator=torch.Generator().manual_seed(1))


def divergence(model: Any, short: Any, texts: torch.Tensor) -> float:
    with torch.no_grad():
        wanted, found = (each(texts).logits.log_softmax(-1).flatten(0, 1) for each in (model, short))
    return float(torch.nn.functional.kl_div(found, wanted, reduction="batchmean", log_target=True))


def test_all_layers_are_the_model_and_fewer_are_those(
    example: Any, source: Path, texts: torch.Tensor
) -> None:
    model, _ = example.opened(source)
    assert divergence(model, example.shortened(model, list(range(LAYERS))), texts) == 0
    short = example.shortened(model, [0, 3])
    assert short.config.num_hidden_layers == 2
    assert torch.equal(short.model.layers[1].mlp.up_proj.weight, model.model.layers[3].mlp.up_proj.weight)
    assert divergence(model, short, texts) > 0


def test_what_is_left_learns(example: Any, source: Path, texts: torch.Tensor) -> None:
    model, _ = example.opened(source)
    short = example.shortened(model, [0, 3])
    before = divergence(model, short, texts)
    with torch.no_grad():
        told = model(texts[:, :-1]).logits.log_softmax(-1).topk(20)
    table = short.model.embed_tokens.weight.clone()
    example.distil(short, example.Texts(texts, told.indices, told.values), 40, itertools.count().__next__)
    assert divergence(model, short, texts) < 0.9 * before
    assert torch.equal(short.model.embed_tokens.weight, table)


def test_the_command_makes_a_folder_that_becomes_a_draft(
    example: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = export_tiny(source, tmp_path / "model")
    given = ["distil_draft.py", str(source), str(artifact.folder), str(tmp_path / "draft")]
    flags = ["--layers", "0,3", "--minutes", "0.05", "--opening", "The"]
    monkeypatch.setattr(example, "TOKENS", 24)
    monkeypatch.setattr(sys, "argv", [*given, *flags])
    example.main()
    made = export_tiny(tmp_path / "draft", tmp_path / "artifact", precision="int4", block_size=32)
    found = find_draft(made.folder, load_artifact(artifact.folder), None, SessionConfig(threads=1, slots=2))
    assert found.artifact.manifest.model.num_hidden_layers == 2


def test_a_gguf_file_is_a_source_too(example: Any, tmp_path: Path) -> None:
    model, _ = example.opened(write_gguf(tmp_path / "tiny.gguf"))
    example.shortened(model, [1]).save_pretrained(tmp_path / "draft")
    assert (tmp_path / "draft" / "config.json").is_file()
