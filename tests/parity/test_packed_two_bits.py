"""Packed codes of 2 bits, whose inputs are rounded only if that is asked for: numpy's logits of the values,
from a file that keeps 2 bits.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from llorch_export.inspect.contents import contents
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.preview import preview
from llorch_export.terminal.inspect import describe
from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import Recipe
from support.builders import packed_hqq
from support.builders.packed_checkpoints import Group, Packed, write_compressed, write_gptq
from support.builders.packed_folders import write_packed
from support.builders.tiny_exports import all_logits, random_ids, silent
from support.oracles import numpy_llama
from tolerances import QUANTISED_LOGITS_LEVEL_0

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
UNEVEN: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24}
LARGER: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}
IDS = random_ids(40)
WIDENED = "4 bits, block 32, exactly, of 2 bits in the file, inputs not rounded"
FORMS: dict[str, Any] = {
    "gptq": lambda path, shape: write_gptq(path, shape, bits=2),
    "gptq, zero points, order": lambda path, shape: write_gptq(
        path, shape, bits=2, symmetric=False, order=True, version=2
    ),
    "gptq, one group": lambda path, shape: write_gptq(path, shape, bits=2, group=-1),
    "compressed-tensors": lambda path, shape: write_compressed(
        path, shape, Group("pack-quantized", bits=2, symmetric=False)
    ),
    "hqq": lambda path, shape: write_packed(
        path, shape, packed_hqq.matrix(2, 32, whole=False), packed_hqq.SETTINGS, skip=("lm_head",)
    ),
}


def options(packed: Packed, output: Path, **more: Any) -> ExportOptions:
    return ExportOptions(str(packed.folder), output, precision="source", **more)


def levels(artifact: Artifact) -> dict[str, tuple[int, int]]:
    """Return bits and accuracy level of each product with codes, by the name of its module."""
    found = {}
    for node in onnx.load(artifact.graph_path, load_external_data=False).graph.node:
        if node.op_type == "MatMulNBits":
            settings = {a.name: a.i for a in node.attribute}
            name = node.output[0].removesuffix("/product")
            found[name] = (settings["bits"], settings["accuracy_level"])
    return found


@pytest.mark.parametrize(("form", "level"), [*itertools.product(FORMS, [None, 0])])
def test_inputs_are_not_rounded_where_nobody_asks_for_it(
    tmp_path: Path, form: str, level: int | None
) -> None:
    packed = FORMS[form](tmp_path / "m", UNEVEN)
    artifact = export(options(packed, tmp_path / "a", accuracy_level=level), silent).artifact
    expected = numpy_llama.forward(packed.config, packed.values, IDS)
    np.testing.assert_allclose(all_logits(artifact, IDS), expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)
    assert set(levels(artifact).values()) == {(4, 0)}
    assert WIDENED in describe(contents(artifact))


def test_the_notice_says_what_it_costs_and_how_to_have_it_otherwise(tmp_path: Path) -> None:
    packed = FORMS["gptq"](tmp_path / "m", SHAPE)
    asked = options(packed, tmp_path / "a")
    (said,) = export(asked, silent).notices
    assert WIDENED in said
    assert "MiB more once the runtime has loaded them" in said
    assert "--accuracy-level 4 keeps 2 bits in memory and rounds inputs to 8 bits" in said
    assert said in list(preview(asked)["notices"])  # type: ignore[call-overload]
    (said,) = export(options(packed, tmp_path / "b", accuracy_level=0), silent).notices
    assert WIDENED in said
    assert "--accuracy-level" not in said


def test_who_asks_for_rounded_inputs_gets_them_and_2_bits_in_memory(tmp_path: Path) -> None:
    packed = FORMS["gptq"](tmp_path / "m", SHAPE)
    result = export(options(packed, tmp_path / "a", accuracy_level=4), silent)
    assert set(levels(result.artifact).values()) == {(2, 4)}
    assert "(2 bits, block 32, exactly)" in result.notices[0]
    assert "rounded" not in result.notices[0]
    again = options(packed, tmp_path / "a", if_changed=True)
    assert export(again, silent).changed, "by default it is another artifact"
    assert not export(again, silent).changed


def test_other_codes_of_the_same_model_have_rounded_inputs(tmp_path: Path) -> None:
    rules = {r"+:.*down_proj": {"bits": 8}, r"+:.*o_proj": {"bits": 4, "group_size": 64}}
    own = {"down_proj": (8, 32), "o_proj": (4, 64)}
    packed = write_gptq(tmp_path / "m", SHAPE, bits=2, own=own, dynamic=rules)
    artifact = export(options(packed, tmp_path / "a"), silent).artifact
    for name, found in levels(artifact).items():
        expected = (8, 4) if "down_proj" in name else (4, 4) if "o_proj" in name else (4, 0)
        assert found == expected, name
    recipe = artifact.manifest.recipe
    assert (recipe.accuracy_level, recipe.two_bit_accuracy_level) == (4, 0)


def test_nothing_is_said_in_a_manifest_of_wider_codes(tmp_path: Path) -> None:
    artifact = export(options(write_gptq(tmp_path / "m", SHAPE), tmp_path / "a"), silent).artifact
    assert artifact.manifest.recipe.two_bit_accuracy_level is Recipe.__struct_defaults__[-1]
    assert "two_bit_accuracy_level" not in (tmp_path / "a" / "llorch.json").read_text()


@pytest.mark.parametrize("form", FORMS)
def test_a_file_keeps_2_bits(tmp_path: Path, form: str) -> None:
    packed = FORMS[form](tmp_path / "m", LARGER)
    before = (packed.folder / "model.safetensors").stat().st_size
    apart = 2 * 128 * 32 * 4 + 2**16 * 4  # rotary tables, and the table that all matrices share
    for level in (None, 0):
        found = preview(options(packed, tmp_path / "a", accuracy_level=level))
        assert int(str(found["data_bytes"])) - apart <= 1.05 * before


def test_a_target_that_widens_nothing_rounds_as_it_did(tmp_path: Path) -> None:
    packed = FORMS["gptq"](tmp_path / "m", SHAPE)
    result = export(options(packed, tmp_path / "a", target="openvino"), silent)
    assert "inputs not rounded" not in result.notices[0]
    assert "two_bit_accuracy_level" not in (tmp_path / "a" / "llorch.json").read_text()


def test_a_graph_for_prompts_reads_the_same_weights(tmp_path: Path) -> None:
    packed = FORMS["gptq"](tmp_path / "m", SHAPE)
    prompts = ExportOptions("", Path(), precision="int8", activations="row", kv_dtype="float32")
    artifact = export(options(packed, tmp_path / "a", prompts=prompts), silent).artifact
    assert (4, 0) in levels(artifact).values()


def test_a_graph_for_prompts_over_the_same_codes_does_not_round_either(tmp_path: Path) -> None:
    packed = FORMS["gptq"](tmp_path / "m", SHAPE)
    prompts = ExportOptions("", Path(), precision="source", kv_dtype="float32")
    artifact = export(options(packed, tmp_path / "a", prompts=prompts), silent).artifact
    assert artifact.manifest.prompts is not None
    assert artifact.manifest.prompts.recipe.two_bit_accuracy_level == 0
    expected = numpy_llama.forward(packed.config, packed.values, IDS)
    np.testing.assert_allclose(all_logits(artifact, IDS), expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)


def test_vectors_of_texts_come_of_the_same_products(tmp_path: Path) -> None:
    packed = FORMS["gptq"](tmp_path / "m", SHAPE)
    artifact = export(options(packed, tmp_path / "a", embed="mean"), silent).artifact
    assert set(levels(artifact).values()) == {(4, 0)}
