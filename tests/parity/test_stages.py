"""A model in stages computes the bits of the model in one graph: its graphs are run one after another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llorch_export.adapter.choice import AdapterChoice
from llorch_export.graph.stage_choice import parse_stages
from llorch_export.options import ExportOptions
from llorch_serve.artifact.folder import Artifact
from support.builders.adapters import write_adapter
from support.builders.arch_rows import HF
from support.builders.checkpoints import tiny_llama_config, write_gguf, write_hf_folder
from support.builders.packed_checkpoints import write_gptq
from support.builders.tiny_exports import export_tiny, random_ids
from support.harness.stage_chain import Array, Chain, GraphOf, decode_graph, first_graph, prompts_graph
from support.oracles.gguf_blocks import random_blocks

LAYERS = {"num_hidden_layers": 4}
WIDENED = LAYERS | {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
CAPACITY = 48


def logits(artifact: Artifact, graph: GraphOf = first_graph, **cache: Any) -> tuple[Array, list[Array]]:
    """Return the logits of a prompt in two parts and of steps behind it, and the cache that they leave."""
    chain, ids = Chain(artifact, CAPACITY, graph, **cache), random_ids(40)
    found = [chain.run(ids[:16], 0), chain.run(ids[16:24], 16)]
    found += [chain.run([id_], position) for position, id_ in enumerate(ids) if position >= 24]
    return np.concatenate(found), chain.cache


def check_same(one: tuple[Array, list[Array]], other: tuple[Array, list[Array]]) -> None:
    np.testing.assert_array_equal(one[0].view(np.uint8), other[0].view(np.uint8))
    for found, expected in zip(one[1], other[1], strict=True):
        np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


def both(folder: Path, source: Path, stages: str, **options: Any) -> tuple[Artifact, Artifact]:
    whole = export_tiny(source, folder / "whole", **options)
    return whole, export_tiny(source, folder / "staged", stages=parse_stages(stages), **options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", ["2", "3,at=1,2", "4"])
def test_stages_give_the_bits_of_one_graph(tmp_path: Path, stages: str, *, tied: bool) -> None:
    source = write_hf_folder(tmp_path / "model", LAYERS | {"tie_word_embeddings": tied})
    whole, staged = both(tmp_path, source, stages)
    check_same(logits(staged), logits(whole))


FORMS = {
    "norms of mean and variance": "starcoder2",
    "attention and MLP side by side": "cohere2",
    "norms behind the blocks": "olmo2",
    "norms around the blocks": "gemma2",
    "experts": "qwen3_moe",
}


@pytest.mark.parametrize("family", FORMS.values(), ids=FORMS)
def test_so_do_layers_of_every_form(tmp_path: Path, family: str) -> None:
    whole, staged = both(tmp_path, write_hf_folder(tmp_path / "model", HF[family]), "2")
    check_same(logits(staged), logits(whole))
    after = whole.manifest.model.form.norm_placement == "after"
    assert staged.manifest.stages
    first, last = staged.manifest.stages
    cut = first.end_layer
    assert first.takes == ()
    assert last.takes == ((f"hidden.{cut}",) if after else (f"residual.{cut}", f"delta.{cut}"))


ROWS = ExportOptions("", Path(), precision="int8", activations="row")
FORMATS: dict[str, dict[str, Any]] = {
    "int8 and prompts": {"precision": "int8", "prompts": ROWS},
    "prompts of the same weights": {"precision": "int8", "prompts": replace(ROWS, activations=None)},
    "int4": {"precision": "int4", "quantizer": "affine"},
    "fp16": {"precision": "fp16"},
    "transformed": {"precision": "int8", "activations": "static", "transforms": ("rotate", "hadamard")},
    "portable": {"precision": "int8", "target": "portable"},
    "cuda": {"precision": None, "target": "cuda"},
}


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_so_do_weights_of_every_form_and_all_graphs(tmp_path: Path, options: dict[str, Any]) -> None:
    source = write_hf_folder(tmp_path / "model", LAYERS | {"tie_word_embeddings": True})
    whole, staged = both(tmp_path, source, "3", **options)
    check_same(logits(staged), logits(whole))
    if whole.manifest.int8_cache is not None:
        check_same(
            logits(staged, decode_graph, kv_dtype="int8"), logits(whole, decode_graph, kv_dtype="int8")
        )
        scales = b"".join((staged.folder / str(s.scales)).read_bytes() for s in staged.manifest.stages or ())
        assert scales == (whole.folder / whole.manifest.int8_cache.scales).read_bytes()
    if whole.manifest.prompts is not None:
        check_same(logits(staged, prompts_graph), logits(whole, prompts_graph))
    assert staged.manifest.kv == whole.manifest.kv
    assert (staged.manifest.inputs, staged.manifest.outputs) == (
        whole.manifest.inputs,
        whole.manifest.outputs,
    )


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_so_do_the_blocks_of_a_gguf_file(tmp_path: Path, kind: str) -> None:
    def blocks(_name: str, rows: int, columns: int) -> tuple[str, npt.NDArray[np.uint8]]:
        return kind, random_blocks(kind, rows, columns, seed=rows)

    shape = LAYERS | {
        "hidden_size": 256,
        "intermediate_size": 256,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
    source = write_gguf(tmp_path / "model.gguf", shape, blocks=blocks)
    whole, staged = both(tmp_path, source, "2", precision="source")
    check_same(logits(staged), logits(whole))


def test_so_does_an_adapter(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model", LAYERS)
    write_adapter(tmp_path / "adapter", tiny_llama_config(**LAYERS))
    adapted = {"lora": (AdapterChoice(tmp_path / "adapter"),)}
    whole, staged = both(tmp_path, source, "2", **adapted)
    check_same(logits(staged), logits(whole))
    assert not np.array_equal(logits(whole)[0], logits(export_tiny(source, tmp_path / "plain"))[0])


def test_so_do_codes_that_the_runtime_widens(tmp_path: Path) -> None:
    source = write_gptq(tmp_path / "model", WIDENED, bits=3, order=True).folder
    whole, staged = both(tmp_path, source, "2", precision="source")
    check_same(logits(staged), logits(whole))
    # Each stage says what its own weights take more in memory.
    assert staged.manifest.stages
    parts = [stage.widened_bytes for stage in staged.manifest.stages]
    assert all(parts)
    assert sum(part or 0 for part in parts) == whole.manifest.widened_bytes
