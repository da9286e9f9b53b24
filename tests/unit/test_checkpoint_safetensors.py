"""Hugging Face folders: the index decides, damage is named, and nothing outside the folder is read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import Weights, tiny_llama_config, tiny_weights, write_hf_folder

INDEX = "model.safetensors.index.json"
SHARD_2 = "model-00002-of-00003.safetensors"
ROUNDING = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def _refusal(folder: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_checkpoint(str(folder))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shards", [1, 3])
def test_weights_come_back_exactly_as_they_were_rounded(tmp_path: Path, dtype: str, shards: int) -> None:
    checkpoint = open_checkpoint(str(write_hf_folder(tmp_path / "m", seed=7, dtype=dtype, shards=shards)))
    expected = tiny_weights(tiny_llama_config(), seed=7)
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in checkpoint.tensors.items():
        assert tensor.dtype == dtype
        np.testing.assert_array_equal(
            tensor.load(), expected[name].astype(ROUNDING[dtype]).astype(np.float32)
        )


def test_a_stray_single_file_beside_an_index_is_ignored(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", seed=1, shards=3)
    stray = {"nonsense": np.zeros(3, dtype=np.float32)}
    save_file(stray, folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder))
    expected = tiny_weights(tiny_llama_config(), seed=1)
    np.testing.assert_array_equal(
        checkpoint.tensors["model.norm.weight"].load(), expected["model.norm.weight"]
    )
    assert folder / "model.safetensors" not in checkpoint.content_files


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", shards=3)
    (folder / SHARD_2).unlink()
    assert f"lacks {SHARD_2}, which {INDEX} names (1 of 3 shards)" in _refusal(folder)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_file_that_was_cut_short_is_named(tmp_path: Path, shards: int) -> None:
    folder = write_hf_folder(tmp_path / "m", shards=shards)
    path = folder / (SHARD_2 if shards == 3 else "model.safetensors")
    path.write_bytes(path.read_bytes()[:-1024])
    assert f"{path} is truncated or damaged" in _refusal(folder)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x10" + bytes(7) + b"{" * 16, b"not a tensor file at all"]
)
def test_files_of_another_kind_are_named(tmp_path: Path, content: bytes) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors is truncated or damaged" in _refusal(folder)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..\\x.safetensors"]
)
def test_an_index_that_leads_out_of_the_folder_is_refused_before_reading(tmp_path: Path, name: str) -> None:
    folder = write_hf_folder(tmp_path / "m", shards=3)
    save_file({"model.norm.weight": np.zeros(64, dtype=np.float32)}, tmp_path / "x.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))
    assert "expected a plain name inside the folder" in _refusal(folder)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json", "LICENSE"])
def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path: Path, file: str) -> None:
    folder = write_hf_folder(tmp_path / "m")
    outside = tmp_path / "outside"
    outside.mkdir()
    if (folder / file).exists():
        (folder / file).rename(outside / file)
    else:
        (outside / file).write_text("terms")
    (folder / file).symlink_to(outside / file)
    assert f"{folder / file} is a link that leads out of its folder" in _refusal(folder)


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    assert open_checkpoint(str(folder)).kind == "safetensors"


@pytest.mark.parametrize(
    "index", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "{", "[" * 100_000]
)
def test_a_broken_index_is_named(tmp_path: Path, index: str) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / INDEX).write_text(index)
    assert INDEX in _refusal(folder)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", shards=3)
    index = json.loads((folder / INDEX).read_text())
    name = next(name for name, shard in index["weight_map"].items() if shard != SHARD_2)
    index["weight_map"][name] = SHARD_2
    (folder / INDEX).write_text(json.dumps(index))
    assert f"{SHARD_2} lacks tensor {name}, which {INDEX} says it holds" in _refusal(folder)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", shards=3)
    config = tiny_llama_config()
    weights = tiny_weights(config)
    save_file(weights, folder / SHARD_2)
    assert "both hold tensor" in _refusal(folder)


@pytest.mark.parametrize("dtype", ["F64", "I32"])
def test_other_storage_types_are_refused_by_name(tmp_path: Path, dtype: str) -> None:
    message = _refusal(write_hf_folder(tmp_path / "m", dtype=dtype))
    assert f"has storage type {dtype}; supported are F32, F16, BF16" in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_without_being_opened(tmp_path: Path, name: str) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "executed",))

    folder = write_hf_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap()))
    message = _refusal(folder)
    assert name in message
    assert "save_pretrained" in message
    assert not (tmp_path / "executed").exists()


def test_an_index_of_pickled_shards_is_refused(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / INDEX).write_text('{"weight_map": {"a": "pytorch_model.bin"}}')
    assert "names the file 'pytorch_model.bin', expected only .safetensors files" in _refusal(folder)


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_bias_tensors_without_the_flag_are_listed(tmp_path: Path, bias: str) -> None:
    folder = write_hf_folder(tmp_path / "m", {bias: True})
    config = json.loads((folder / "config.json").read_text()) | {bias: False}
    (folder / "config.json").write_text(json.dumps(config))
    message = _refusal(folder)
    assert "has no use for" in message
    assert ("self_attn.q_proj.bias" if bias == "attention_bias" else "mlp.gate_proj.bias") in message


def test_missing_tensors_are_listed(tmp_path: Path) -> None:
    def drop(weights: Weights) -> None:
        del weights["model.layers.0.mlp.up_proj.weight"], weights["lm_head.weight"]

    message = _refusal(write_hf_folder(tmp_path / "m", edit=drop))
    assert "lacks 2 of 21 tensors" in message
    assert "model.layers.0.mlp.up_proj.weight, lm_head.weight" in message


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    def transpose(weights: Weights) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        weights[name] = weights[name].T

    message = _refusal(write_hf_folder(tmp_path / "m", edit=transpose))
    assert "model.layers.0.mlp.up_proj.weight is [64, 96], expected [96, 64]" in message


def test_old_rotary_buffers_are_no_surplus(tmp_path: Path) -> None:
    def add(weights: Weights) -> None:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, dtype=np.float32)
        weights["model.rotary_emb.inv_freq"] = np.ones(8, dtype=np.float32)

    for shards in (1, 3):
        assert (
            len(
                open_checkpoint(str(write_hf_folder(tmp_path / f"{shards}", edit=add, shards=shards))).tensors
            )
            == 21
        )


def test_a_tied_head_that_repeats_the_embedding_is_left_out(tmp_path: Path) -> None:
    def repeat(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()

    folder = write_hf_folder(tmp_path / "m", {"tie_word_embeddings": True}, edit=repeat)
    assert "lm_head.weight" not in open_checkpoint(str(folder)).tensors


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path: Path) -> None:
    def differ(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
        weights["lm_head.weight"][-1, -1] += 1

    folder = write_hf_folder(tmp_path / "m", {"tie_word_embeddings": True}, edit=differ)
    assert "lm_head.weight differs from model.embed_tokens.weight" in _refusal(folder)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / "config.json").unlink()
    assert "has no config.json" in _refusal(folder)


def test_every_load_reads_anew(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    tensor = open_checkpoint(str(folder)).tensors["model.norm.weight"]
    tensor.load()[:] = 0
    assert tensor.load().any()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match="cannot be read: No such file"):
        tensor.load()
