"""How much memory attention's scores may take, and which calls are cut for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import pytest

from llorch_serve.artifact.manifest import ComputeType, Manifest
from llorch_serve.runtime.graph_choice import GraphChoice, GraphFile
from llorch_serve.runtime.score_memory import MOST_BYTES, most_rows, plain_fits
from support.builders.tiny_artifact import tiny_manifest


def shaped(heads: int, compute_type: ComputeType = "float32", **form: Any) -> Manifest:
    manifest = tiny_manifest()
    layer_form = msgspec.structs.replace(manifest.model.form, **form)
    model = msgspec.structs.replace(manifest.model, num_attention_heads=heads, layer_form=layer_form)
    recipe = msgspec.structs.replace(manifest.recipe, compute_type=compute_type)
    return msgspec.structs.replace(manifest, model=model, recipe=recipe)


def chosen(manifest: Manifest, **changed: Any) -> GraphChoice:
    graphs = GraphChoice(manifest.kv, GraphFile("decode", manifest.recipe), None, None)
    return replace(graphs, **changed)


CHOSEN_PLAIN: tuple[dict[str, Any], ...] = (
    {"prompts": GraphFile("prompts", shaped(64).recipe)},
    {"int8_cache": mock.Mock()},
)


def test_the_plain_kernel_fits_up_to_its_bytes() -> None:
    manifest = shaped(heads=8)
    context = MOST_BYTES // (4 * 8 * 256)
    assert plain_fits(manifest, rows=256, context=context)
    assert not plain_fits(manifest, rows=256, context=context + 1)
    assert not plain_fits(manifest, rows=257, context=context)


@pytest.mark.parametrize(
    "manifest",
    [
        shaped(64, attention_softcap=50.0),
        shaped(64, sinks=True),
        shaped(64, compute_type="float16"),
    ],
    ids=["soft cap", "sinks", "float16"],
)
def test_calls_are_cut_where_no_kernel_works_in_tiles(manifest: Manifest) -> None:
    graphs = chosen(manifest)
    assert most_rows(manifest, graphs, 1024) is None, "a whole sequence fits"
    assert most_rows(manifest, graphs, 4096) == 256, "a chunk by default does, and a longer one does not"
    rows = most_rows(manifest, graphs, 16_384)
    assert rows == 64
    assert plain_fits(manifest, rows=rows, context=16_384)
    assert most_rows(manifest, graphs, 131_072) == 32, "not fewer, however long"


def test_calls_stay_whole_where_the_kernel_in_tiles_takes_them() -> None:
    manifest = shaped(64)
    assert most_rows(manifest, chosen(manifest), 4096) is None
    for changed in CHOSEN_PLAIN:
        assert most_rows(manifest, chosen(manifest, **changed), 131_072) is None, "a chunk does not fit"


@pytest.mark.parametrize("changed", CHOSEN_PLAIN, ids=["graph for prompts", "int8"])
def test_longer_chunks_are_cut_where_the_plain_kernel_is_chosen_for_prompts(changed: dict[str, Any]) -> None:
    manifest = shaped(64)
    graphs = chosen(manifest, **changed)
    assert most_rows(manifest, graphs, 1024) is None, "a whole sequence fits"
    rows = most_rows(manifest, graphs, 2048)
    assert rows == 512
    assert plain_fits(manifest, rows=rows, context=2048)
    assert not plain_fits(manifest, rows=1024, context=2048), "--prefill-chunk 1024 would take more"
