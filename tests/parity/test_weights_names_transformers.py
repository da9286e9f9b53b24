"""Folders whose files or names are out of the ordinary are read as transformers reads them, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llorch_export.source.open import open_checkpoint
from llorch_export.verify.divergence import verify
from llorch_serve.bench.workload import sample_text
from support.builders.checkpoints import Weights, write_gguf, write_hf_folder
from support.builders.tiny_exports import export_tiny, silent
from tolerances import KL_FP32

pytestmark = pytest.mark.reference

TIED = {"tie_word_embeddings": True}
INDEX = "model.safetensors.index.json"


def _edited(
    edit: Callable[[Weights], None], overrides: dict[str, object] | None = None
) -> Callable[..., Path]:
    return lambda path: write_hf_folder(path, overrides, seed=9, edit=edit)


def _rename(pattern: str, by: str) -> Callable[[Weights], None]:
    def edit(weights: Weights) -> None:
        for name in list(weights):
            weights[re.sub(pattern, by, name)] = weights.pop(name)

    return edit


def _head_alone(weights: Weights) -> None:
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")


def _head_too(weights: Weights) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()


def _buffers(weights: Weights) -> None:
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.full(8, 3, np.float32)
    weights["model.rotary_emb.inv_freq"] = np.full(8, 3, np.float32)
    weights["model.layers.1.self_attn.masked_bias"] = np.ones(1, np.float32)
    weights["v_head.summary.weight"] = np.ones((1, 64), np.float32)


def _single_beside_index(path: Path) -> Path:
    folder = write_hf_folder(path, seed=1, shards=3)
    (write_hf_folder(path / "other", seed=2) / "model.safetensors").rename(folder / "model.safetensors")
    return folder


def _wrong_index(path: Path) -> Path:
    folder = write_hf_folder(path, seed=3, shards=3)
    index = json.loads((folder / INDEX).read_text())
    names, shards = list(index["weight_map"]), list(index["weight_map"].values())
    index["weight_map"] = dict(zip(names, shards[1:] + shards[:1], strict=True)) | {"nowhere": shards[0]}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def _twice(path: Path) -> Path:
    folder = write_hf_folder(path, seed=4, shards=2)
    first, second = sorted(folder.glob("model-*.safetensors"))
    save_file(load_file(first) | load_file(second), first)
    return folder


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "base model": _edited(_rename(r"^model\.", "")),
    "doubled": _edited(_rename(r"^model\.", "model.model.")),
    "all doubled": _edited(_rename(r"^", "model.")),
    "base model, tied": _edited(_rename(r"^model\.", ""), TIED),
    "head and embedding alike": _edited(_head_too, TIED),
    "buffers and a value head": _edited(_buffers),
    "single beside index": _single_beside_index,
    "index that is wrong": _wrong_index,
    "tensors in two shards": _twice,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_are_those_that_transformers_loads(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = FOLDERS[name](tmp_path / "m")
    checkpoint = open_checkpoint(str(folder))
    assert not checkpoint.only_read_here
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert set(checkpoint.tensors) == set(loaded)
    for key, tensor in checkpoint.tensors.items():
        np.testing.assert_array_equal(tensor.load(), loaded[key].detach().numpy(), err_msg=key)


ONLY_READ_HERE: dict[str, Callable[[Path], Path]] = {
    "compiled": _edited(_rename(r"^", "_orig_mod.")),
    "head alone": _edited(_head_alone, TIED),
    "GGUF in parts": lambda path: write_gguf(path.with_suffix(".gguf"), tensors_a_part=8),
}


@pytest.mark.parametrize("name", ONLY_READ_HERE)
def test_what_transformers_does_not_find_is_handed_to_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llorch_export.verify.sample_tokens.sample_text", lambda: sample_text()[:300])
    source = ONLY_READ_HERE[name](tmp_path / "m")
    artifact = export_tiny(source, tmp_path / "a")
    found = verify(artifact.folder, str(source), silent)
    assert found.kl < KL_FP32
    assert "on tensors as llorch reads them" in found.oracle
