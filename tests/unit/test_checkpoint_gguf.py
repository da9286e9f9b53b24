"""GGUF tensors arrive under Hugging Face's names, in its order, as float32; everything else is refused by
name.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from llorch_export.checkpoint import stream
from llorch_export.checkpoint.gguf import SUPPORTED_TYPES, gguf_model_name
from llorch_export.checkpoint.gguf_header import read_header
from llorch_export.checkpoint.stream import FLOAT_CODECS
from llorch_export.source.open import open_checkpoint, open_config
from llorch_serve.errors import ArtifactError
from support.builders.arch_rows import HF
from support.builders.checkpoints import (
    Weights,
    llama3_frequency_factors,
    permuted,
    tiny_llama_config,
    tiny_weights,
    write_gguf,
    write_hf_folder,
)
from support.oracles.gguf_blocks import dequantised, random_blocks

LLAMA_CPP_BLOCKS = Path(__file__).resolve().parents[1] / "data" / "published" / "gguf-blocks.jsonl"
SHAPES: list[dict[str, object]] = [
    {},
    {"num_attention_heads": 8, "num_key_value_heads": 1},
    {"num_key_value_heads": 4},
    {"head_dim": 32},
    {"hidden_size": 56, "num_attention_heads": 6, "head_dim": 16},
    {"attention_bias": True, "mlp_bias": True},
    {"tie_word_embeddings": True},
]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("overrides", SHAPES)
def test_a_gguf_file_and_a_folder_of_the_same_weights_are_equal(
    tmp_path: Path, overrides: dict[str, object]
) -> None:
    folder = open_checkpoint(str(write_hf_folder(tmp_path / "hf", overrides, seed=3)))
    file = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", overrides, seed=3)))
    assert file.config == folder.config
    assert list(file.tensors) == list(folder.tensors)
    for name, tensor in file.tensors.items():
        loaded = tensor.load()
        assert loaded.dtype == np.float32
        assert loaded.shape == tensor.shape
        np.testing.assert_array_equal(loaded, folder.tensors[name].load(), err_msg=name)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"xielu.alpha_p": None}, r"xielu.alpha_p is None, expected a finite number for each of 2 layers"),
        ({"xielu.beta": [0.5]}, r"xielu.beta is \(0.5,\), expected"),
        ({"xielu.eps": [-1e-6, float("nan")]}, r"xielu.eps is .*nan"),
        ({"xielu.alpha_n": "1"}, r"xielu.alpha_n is '1', expected"),
        ({"xielu.alpha_n": [True, False]}, r"xielu.alpha_n is \(True, False\), expected"),
    ],
)
def test_factors_of_an_activation_that_are_not_there_are_refused(
    tmp_path: Path, changes: dict[str, object], found: str
) -> None:
    with pytest.raises(ArtifactError, match=found):
        open_checkpoint(str(write_gguf(tmp_path / "m.gguf", HF["apertus"], metadata=changes)))


def test_a_factor_may_be_one_for_all_layers(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", HF["apertus"], metadata={"xielu.beta": 0.25})
    tensors = open_checkpoint(str(file)).tensors
    assert [tensors[f"model.layers.{layer}.mlp.act_fn.beta"].load()[0] for layer in (0, 1)] == [0.25, 0.25]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize(
    "overrides", [{"attention_bias": True}, HF["qwen2"], HF["phi"], HF["phi3"], HF["glm"], HF["mixtral"]]
)
def test_a_file_with_query_key_and_value_in_one_tensor_is_the_same_model(
    tmp_path: Path, overrides: dict[str, object], kind: str
) -> None:
    apart, in_one = (
        open_checkpoint(
            str(write_gguf(tmp_path / f"{fused}.gguf", overrides, weight_type=kind, fused_qkv=fused))
        )
        for fused in (False, True)
    )
    assert in_one.config == apart.config
    assert list(in_one.tensors) == list(apart.tensors)
    for name, tensor in in_one.tensors.items():
        expected = apart.tensors[name]
        np.testing.assert_array_equal(tensor.load(), expected.load(), err_msg=name)
        assert (tensor.read_blocks is None) is (expected.read_blocks is None)
        if tensor.read_blocks is not None and expected.read_blocks is not None:
            found, wanted = (read(0, tensor.shape[0]) for read in (tensor.read_blocks, expected.read_blocks))
            np.testing.assert_array_equal(found, wanted, err_msg=name)


# Relative to the largest weight of a block: half a step of the grid, with room for the scale's own rounding.
STEP = {"F16": 1e-3, "BF16": 8e-3, "Q8_0": 8e-3, "Q4_0": 0.15, "Q4_1": 0.15, "Q5_0": 0.08, "Q5_1": 0.08}


@pytest.mark.parametrize("kind", STEP)
def test_stored_types_come_back_within_their_own_precision(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", seed=5, weight_type=kind)
    tensors = open_checkpoint(str(path)).tensors
    for name, expected in tiny_weights(tiny_llama_config(), seed=5).items():
        assert tensors[name].dtype == (kind if expected.ndim == 2 else "F32")
        difference = np.abs(tensors[name].load() - expected).max()
        assert difference <= STEP[kind] * np.abs(expected).max()
        assert difference > 0 or expected.ndim == 1


@pytest.mark.parametrize("kind", [kind for kind in SUPPORTED_TYPES if kind not in FLOAT_CODECS])
def test_blocks_of_every_type_are_decoded_row_by_row_and_put_in_order(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    given = random_blocks(kind, 256, 256, seed=1)
    path = write_gguf(
        tmp_path / "m.gguf",
        overrides,
        blocks=lambda name, *_: (kind, given) if name == "blk.0.attn_q.weight" else None,
    )
    checkpoint = open_checkpoint(str(path))
    tensor = checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert tensor.dtype == kind
    for piece in (2**18, 700):
        monkeypatch.setattr(stream, "_PIECE_ELEMENTS", piece)
        found = permuted(tensor.name, tensor.load(), checkpoint.config)
        np.testing.assert_array_equal(found, dequantised(kind, given))


def test_every_type_is_read_as_llama_cpp_reads_it() -> None:
    rows = [json.loads(line) for line in LLAMA_CPP_BLOCKS.read_text(encoding="utf-8").splitlines()]
    assert {row["type"] for row in rows} == {*SUPPORTED_TYPES} - {*FLOAT_CODECS}
    for row in rows:
        blocks = np.frombuffer(base64.b64decode(row["blocks"]), np.uint8)
        found = dequantised(row["type"], blocks[None])[0]
        first = np.frombuffer(base64.b64decode(row["weights"]), "<f4")
        np.testing.assert_array_equal(found[: len(first)], first, err_msg=row["type"])
        same = hashlib.sha256((found + 0).astype("<f4").tobytes()).hexdigest()  # + 0: no negative zeros
        assert same == row["sha256"], row["type"]


def test_stored_blocks_are_read_in_any_range_of_rows(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", weight_type="Q5_1")
    tensors = open_checkpoint(str(path)).tensors
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        tensor = tensors[f"model.layers.1.{name}.weight"]
        expected = tensor.load()
        assert tensor.read_blocks is not None
        for start, stop in ((0, tensor.shape[0]), (0, 1), (5, 23), (tensor.shape[0] - 3, tensor.shape[0])):
            data = tensor.read_blocks(start, stop)
            assert data.shape == (stop - start, tensor.shape[1] // 32 * 24)
            found = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q5_1)
            np.testing.assert_array_equal(found, expected[start:stop], err_msg=f"{name} {start}:{stop}")


def test_only_quantised_matrices_have_stored_blocks(tmp_path: Path) -> None:
    tensors = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", weight_type="Q8_0"))).tensors
    assert {t.dtype for t in tensors.values() if t.read_blocks is None} == {"F32"}
    assert tensors["lm_head.weight"].read_blocks is not None


def test_stored_blocks_of_a_file_that_was_cut_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", weight_type="Q8_0")
    tensor = open_checkpoint(str(path)).tensors["lm_head.weight"]
    assert tensor.read_blocks is not None
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 4)
    with pytest.raises(ArtifactError, match=r"ends inside tensor .*; it is truncated"):
        tensor.read_blocks(0, tensor.shape[0])
    path.unlink()
    with pytest.raises(ArtifactError, match="cannot be read: No such file"):
        tensor.read_blocks(0, 1)


def test_pieces_smaller_than_a_tensor_give_the_same_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", weight_type="Q8_0")
    whole = {name: tensor.load() for name, tensor in open_checkpoint(str(path)).tensors.items()}
    monkeypatch.setattr(stream, "_PIECE_ELEMENTS", 200)
    pieces = open_checkpoint(str(path)).tensors
    assert pieces.keys() == whole.keys() == tiny_weights(tiny_llama_config(), seed=0).keys()
    for name, tensor in pieces.items():
        np.testing.assert_array_equal(tensor.load(), whole[name], err_msg=name)


def test_every_load_reads_anew_and_keeps_no_file_open(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    tensor = open_checkpoint(str(path)).tensors["model.norm.weight"]
    first = tensor.load()
    first[:] = 0
    assert tensor.load().any()
    path.unlink()
    with pytest.raises(ArtifactError, match="cannot be read: No such file"):
        tensor.load()


@pytest.mark.parametrize("type_id", [9, 15, 999])
def test_other_storage_types_are_refused_with_tensor_type_and_what_is_supported(
    tmp_path: Path, type_id: int
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    _patch_type(path, "blk.1.ffn_up.weight", type_id)
    with pytest.raises(ArtifactError) as caught:
        open_checkpoint(str(path))
    message = str(caught.value)
    assert "blk.1.ffn_up.weight" in message
    assert {9: "Q8_1", 15: "Q8_K", 999: "number 999"}[type_id] in message
    assert ", ".join(SUPPORTED_TYPES) in message


def test_rows_that_are_no_multiple_of_a_block_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"hidden_size": 56, "num_attention_heads": 6, "head_dim": 16})
    _patch_type(path, "blk.0.ffn_up.weight", int(gguf.GGMLQuantizationType.Q8_0))
    with pytest.raises(
        ArtifactError, match=r"blk.0.ffn_up.weight has rows of 56 elements, expected a multiple of 32"
    ):
        open_checkpoint(str(path))


def _drop_and_add(weights: Weights) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]


def _narrow(weights: Weights) -> None:
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"][:64]


def test_missing_tensors_are_listed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", edit=_drop_and_add)
    with pytest.raises(ArtifactError, match=r"lacks 1 of 21 tensors .*: blk.1.ffn_up.weight;"):
        open_checkpoint(str(path))


def test_unused_tensors_are_listed(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", extra=extra)
    with pytest.raises(
        ArtifactError, match=r"1 tensors that its config has no use for: blk.0.attn_q_norm.weight"
    ):
        open_checkpoint(str(path))


def test_one_bias_of_a_kind_calls_for_all(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.bias": np.ones(64, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", extra=extra)
    with pytest.raises(ArtifactError, match=r"lacks 7 of 29 tensors .*blk.0.attn_k.bias"):
        open_checkpoint(str(path))


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", edit=_narrow)
    with pytest.raises(ArtifactError, match=r"blk.1.ffn_up.weight is \[64, 64\], expected \[96, 64\]"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_reported_when_read(tmp_path: Path, value: float) -> None:
    def damage(weights: Weights) -> None:
        weights["model.layers.0.mlp.down_proj.weight"][63, 95] = value

    tensors = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", edit=damage))).tensors
    with pytest.raises(ArtifactError, match=r"blk.0.ffn_down.weight holds NaN or infinity"):
        tensors["model.layers.0.mlp.down_proj.weight"].load()


def test_rotary_factors_in_the_file_reach_the_config(tmp_path: Path) -> None:
    overrides = {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}}
    rope = open_config(str(write_gguf(tmp_path / "m.gguf", overrides))).rope
    assert rope.kind == "factors"
    np.testing.assert_array_equal(
        rope.frequency_factors, llama3_frequency_factors(tiny_llama_config(**overrides))
    )
    assert open_config(str(write_gguf(tmp_path / "plain.gguf"))).rope.frequency_factors is None


@pytest.mark.parametrize("shape", [(4, 2), (2000,)])
def test_rotary_factors_of_another_shape_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.ones(shape, dtype=np.float32)})
    with pytest.raises(
        ArtifactError, match=r"rope_freqs.weight has shape .*expected one number a rotary pair"
    ):
        open_config(str(path))


def test_old_rotary_buffers_are_no_surplus(tmp_path: Path) -> None:
    extra = {"blk.0.attn_rot_embd": np.ones(8, dtype=np.float32)}
    assert len(open_checkpoint(str(write_gguf(tmp_path / "m.gguf", extra=extra))).tensors) == 21


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("llama-2-7b.Q4_K_M.gguf", "llama-2-7b"),
        ("model-f16.gguf", "model"),
        ("Q8_0.gguf", "Q8_0"),
        ("llama-3.1-70b-IQ2_XXS.gguf", "llama-3.1-70b"),
        ("model.TQ1_0.gguf", "model"),
        ("model-MXFP4.gguf", "model"),
        ("llama-70b-Q4_K_M-00002-of-00003.gguf", "llama-70b"),
        ("plain.gguf", "plain"),
    ],
)
def test_the_model_is_named_after_the_file_without_its_quantisation(file: str, name: str) -> None:
    assert gguf_model_name(Path(file)) == name


def _patch_type(path: Path, name: str, type_id: int, data: bytes = b"") -> None:
    """Change the storage type of a tensor in place, and optionally its first bytes."""
    tensor = read_header(path).tensors[name]
    content = bytearray(path.read_bytes())
    entry = content.index(len(name).to_bytes(8, "little") + name.encode())
    place = entry + 8 + len(name) + 4 + 8 * len(tensor.shape)
    content[place : place + 4] = type_id.to_bytes(4, "little")
    content[tensor.offset : tensor.offset + len(data)] = data
    path.write_bytes(content)
