"""Hugging Face folders: the index decides, damage is named, and nothing outside the folder is read."""

from __future__ import annotations

import json
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llorch_export.checkpoint.stored_names import module_name
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


def test_a_single_file_beside_an_index_is_what_is_read_and_a_notice_says_so(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", seed=1, shards=3)
    single = write_hf_folder(tmp_path / "single", seed=2) / "model.safetensors"
    single.rename(folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder))
    expected = tiny_weights(tiny_llama_config(), seed=2)
    np.testing.assert_array_equal(
        checkpoint.tensors["model.norm.weight"].load(), expected["model.norm.weight"]
    )
    assert folder / SHARD_2 not in checkpoint.content_files
    (notice,) = checkpoint.notices
    assert f"holds model.safetensors and {INDEX}; the single file is read" in notice
    assert SHARD_2 in notice


def test_an_index_of_a_single_file_says_nothing_new(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    names = dict.fromkeys(tiny_weights(tiny_llama_config()), "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    assert open_checkpoint(str(folder)).notices == ()


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


def test_a_tensor_in_another_shard_than_the_index_says_is_read_where_it_is(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", seed=4, shards=3)
    index = json.loads((folder / INDEX).read_text())
    name = next(name for name, shard in index["weight_map"].items() if shard != SHARD_2)
    index["weight_map"][name] = SHARD_2
    (folder / INDEX).write_text(json.dumps(index))
    expected = tiny_weights(tiny_llama_config(), seed=4)[name]
    np.testing.assert_array_equal(open_checkpoint(str(folder)).tensors[name].load(), expected)


def test_a_tensor_that_no_shard_has_is_named_with_the_shard_that_should(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", shards=3)
    shard = folder / SHARD_2
    weights = load_file(shard)
    name = "model.layers.1.mlp.up_proj.weight"
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    shard = folder / index[name]
    weights = load_file(shard)
    del weights[name]
    save_file(weights, shard)
    assert f"{shard} lacks tensor {name}, which {INDEX} says it holds" in _refusal(folder)


def test_an_index_may_name_tensors_that_the_model_has_no_use_for(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", {"tie_word_embeddings": True}, shards=3)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = SHARD_2
    (folder / INDEX).write_text(json.dumps(index))
    assert "lm_head.weight" not in open_checkpoint(str(folder)).tensors


def test_a_tensor_in_two_shards_counts_once_if_both_are_alike(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", shards=3)
    weights = tiny_weights(tiny_llama_config())
    save_file(weights, folder / SHARD_2)
    assert len(open_checkpoint(str(folder)).tensors) == len(weights)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    name = next(name for name in weights if index[name] != SHARD_2)
    weights[name].flat[3] += 1
    save_file(weights, folder / SHARD_2)
    message = _refusal(folder)
    assert f"both hold tensor {name}, and they differ" in message


def _prefixed(prefix: str) -> Callable[[Weights], None]:
    def edit(weights: Weights) -> None:
        for name in list(weights):
            weights[f"{prefix}{name}"] = weights.pop(name)

    return edit


def _rename(pattern: str, by: str) -> Callable[[Weights], None]:
    def edit(weights: Weights) -> None:
        for name in list(weights):
            weights[re.sub(pattern, by, name)] = weights.pop(name)

    return edit


# As transformers has it: the base model's own names, with its part of the name doubled or missing.
AS_TRANSFORMERS = {
    "of the base model": _rename(r"^model\.", ""),
    "doubled": _rename(r"^model\.", "model.model."),
    "all doubled": _prefixed("model."),
}
LEFT_BY_TRAINING = {
    "compiled": _prefixed("_orig_mod."),
    "compiled inside": _rename(r"^model\.", "model._orig_mod."),
    "compiled layers": _rename(r"(layers\.\d+)\.", r"\1._orig_mod."),
    "fsdp": _rename(r"(layers\.\d+)\.", r"_fsdp_wrapped_module.\1._fsdp_wrapped_module."),
    "checkpointing": _rename(r"(layers\.\d+)\.", r"\1._checkpoint_wrapped_module."),
    "ddp": _prefixed("module."),
    "ddp of compiled": _prefixed("module._orig_mod."),
    "peft": _prefixed("base_model.model."),
    "value head": _prefixed("pretrained_model."),
    "part of a model of images": _prefixed("language_model."),
    "part of a newer model of images": _rename(r"^model\.", "model.language_model."),
}


@pytest.mark.parametrize("kind", AS_TRANSFORMERS | LEFT_BY_TRAINING)
@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True}], ids=["plain", "tied"])
def test_names_that_other_code_changed_are_the_models_own(
    tmp_path: Path, kind: str, overrides: dict[str, object]
) -> None:
    edit = (AS_TRANSFORMERS | LEFT_BY_TRAINING)[kind]
    checkpoint = open_checkpoint(str(write_hf_folder(tmp_path / "m", overrides, seed=5, edit=edit)))
    expected = tiny_weights(tiny_llama_config(**overrides), seed=5)
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in checkpoint.tensors.items():
        np.testing.assert_array_equal(tensor.load(), expected[name], err_msg=name)
    assert checkpoint.only_read_here == (kind in LEFT_BY_TRAINING)
    assert len(checkpoint.notices) == (kind in LEFT_BY_TRAINING)
    assert all("which training leaves there" in notice for notice in checkpoint.notices)


def test_scales_of_fp8_weights_follow_their_weights_names(tmp_path: Path) -> None:
    expected = {"model.layers.0.mlp.up_proj.weight"}
    found = module_name("_orig_mod.model.layers.0.mlp.up_proj.weight_scale_inv", expected)
    assert found.name == "model.layers.0.mlp.up_proj.weight_scale_inv"


def test_one_tensor_under_two_names_must_be_one(tmp_path: Path) -> None:
    def both(weights: Weights, more: float) -> None:
        weights["_orig_mod.model.norm.weight"] = weights["model.norm.weight"] + np.float32(more)

    same = write_hf_folder(tmp_path / "same", edit=lambda weights: both(weights, 0))
    assert len(open_checkpoint(str(same)).tensors) == 21
    other = write_hf_folder(tmp_path / "other", edit=lambda weights: both(weights, 1))
    assert "both hold tensor model.norm.weight, and they differ" in _refusal(other)


@pytest.mark.parametrize("prefix", ["ema.", "vision_model.", "model.model.model.", "module_"])
def test_other_prefixes_are_refused_by_name(tmp_path: Path, prefix: str) -> None:
    message = _refusal(write_hf_folder(tmp_path / "m", edit=_prefixed(prefix)))
    assert "lacks 21 of 21 tensors" in message


def test_a_value_head_is_left_out_with_a_notice(tmp_path: Path) -> None:
    def add(weights: Weights) -> None:
        weights["v_head.summary.weight"] = np.ones((1, 64), np.float32)
        weights["v_head.summary.bias"] = np.ones(1, np.float32)

    checkpoint = open_checkpoint(str(write_hf_folder(tmp_path / "m", edit=add)))
    assert len(checkpoint.tensors) == 21
    (notice,) = checkpoint.notices
    assert "'v_head.summary.bias', 'v_head.summary.weight'" in notice
    assert "left out" in notice
    assert not checkpoint.only_read_here


def test_a_notice_holds_nothing_that_steers_a_terminal(tmp_path: Path) -> None:
    def add(weights: Weights) -> None:
        weights["v_head.\x1b[2J" + "x" * 1000] = np.ones(1, np.float32)

    (notice,) = open_checkpoint(str(write_hf_folder(tmp_path / "m", edit=add))).notices
    assert notice.isprintable()
    assert len(notice) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_scores_instead_of_writing_is_named(tmp_path: Path, tied: bool) -> None:
    def score(weights: Weights) -> None:
        weights["score.weight"] = weights["model.embed_tokens.weight"][:1]
        weights.pop("lm_head.weight", None)

    message = _refusal(write_hf_folder(tmp_path / "m", {"tie_word_embeddings": tied}, edit=score))
    assert "but score.weight: it is a classification or reward model" in message


def test_a_head_that_is_nowhere_says_how_to_tie_it(tmp_path: Path) -> None:
    def drop(weights: Weights) -> None:
        del weights["lm_head.weight"]

    message = _refusal(write_hf_folder(tmp_path / "m", edit=drop))
    assert "has no lm_head.weight, and its config does not tie the head to the embedding" in message
    assert "set tie_word_embeddings to true" in message


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
    assert "weights in .bin, .pt or .pth files are never read" in message or "-hf" in message
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adapter_model.safetensors", "it is an adapter; give the model it was made for"),
        ("model-00001-of-00002.safetensors", f"fetch {INDEX} too"),
        ("consolidated.safetensors", "in the layout of its maker's own code"),
        ("weights.safetensors", "call it model.safetensors"),
    ],
)
def test_weights_under_other_names_are_named_with_what_to_do(tmp_path: Path, name: str, said: str) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / name)
    message = _refusal(folder)
    assert f"found {name}" in message
    assert said in message


@pytest.mark.reference
def test_the_command_that_converts_pickles_converts_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    folder = write_hf_folder(tmp_path / "it's a model", {"tie_word_embeddings": True}, seed=6, dtype="F16")
    weights = {
        name: torch.from_numpy(value) for name, value in load_file(folder / "model.safetensors").items()
    }
    (folder / "model.safetensors").unlink()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # one memory, as tied models have it
    for number in range(2):
        part = {key: weights[key] for key in list(weights)[number::2]}
        torch.save(part, folder / f"pytorch_model-{number + 1:05d}-of-00002.bin")
    command = _refusal(folder).split("without running any: ", 1)[1]
    assert command.startswith("python -c ")
    subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True)
    expected = tiny_weights(tiny_llama_config(tie_word_embeddings=True), seed=6)
    for name, tensor in open_checkpoint(str(folder)).tensors.items():
        assert tensor.dtype == "F16"
        np.testing.assert_array_equal(tensor.load(), expected[name].astype(np.float16).astype(np.float32))


@pytest.mark.slow
@pytest.mark.reference
def test_the_command_that_converts_pickles_runs_no_code_of_theirs(tmp_path: Path) -> None:
    pytest.importorskip("torch")

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "executed",))

    folder = write_hf_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    command = _refusal(folder).split("without running any: ", 1)[1]
    done = subprocess.run([sys.executable, *shlex.split(command)[1:]], capture_output=True, check=False)
    assert done.returncode != 0
    assert not (tmp_path / "executed").exists()
    assert not (folder / "model.safetensors").exists()


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


def test_old_rotary_buffers_and_masks_are_no_surplus(tmp_path: Path) -> None:
    def add(weights: Weights) -> None:
        for name in ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "masked_bias", "bias"):
            weights[f"model.layers.0.self_attn.{name}"] = np.ones(8, dtype=np.float32)
        weights["model.rotary_emb.inv_freq"] = np.ones(8, dtype=np.float32)
        weights["model.rotary_emb.original_inv_freq"] = np.ones(8, dtype=np.float32)
        weights["model.causal_mask"] = np.ones((8, 8), dtype=np.float32)

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


@pytest.mark.parametrize("shards", [1, 3])
def test_a_tied_table_may_be_there_as_the_head_alone(tmp_path: Path, shards: int) -> None:
    def swap(weights: Weights) -> None:
        weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")

    overrides = {"tie_word_embeddings": True}
    folder = write_hf_folder(tmp_path / "m", overrides, seed=8, edit=swap, shards=shards)
    checkpoint = open_checkpoint(str(folder))
    expected = tiny_weights(tiny_llama_config(**overrides), seed=8)
    assert set(checkpoint.tensors) == set(expected)
    table = checkpoint.tensors["model.embed_tokens.weight"].load()
    np.testing.assert_array_equal(table, expected["model.embed_tokens.weight"])


@pytest.mark.parametrize("more", [0, 1])
def test_a_tied_head_of_another_type_is_compared_by_its_values(tmp_path: Path, more: int) -> None:
    folder = write_hf_folder(tmp_path / "m", {"tie_word_embeddings": True}, dtype="F16")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].astype(np.float32)
    weights["lm_head.weight"][-1, -1] += more
    save_file(weights, folder / "model.safetensors")
    if more:
        assert "lm_head.weight differs" in _refusal(folder)
    else:
        assert "lm_head.weight" not in open_checkpoint(str(folder)).tensors


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path: Path) -> None:
    def differ(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
        weights["lm_head.weight"][-1, -1] += 1

    folder = write_hf_folder(tmp_path / "m", {"tie_word_embeddings": True}, edit=differ)
    message = _refusal(folder)
    assert "lm_head.weight differs from model.embed_tokens.weight" in message
    assert "transformers before 5 leaves that head out, and since 5 it keeps it" in message


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
