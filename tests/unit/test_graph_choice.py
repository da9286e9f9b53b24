"""Which graphs of an artifact a session loads, told from its manifest and the configuration alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from llorch_serve.artifact.manifest import Int8Cache, Manifest, PromptGraph
from llorch_serve.config import SessionConfig
from llorch_serve.errors import UsageError
from llorch_serve.runtime.graph_choice import GraphChoice, choose_graphs
from support.builders.tiny_artifact import tiny_manifest

INT8 = Int8Cache(decode_graph="int8.onnx", scales="scales.bin", min_onnxruntime="1.24.1")


@pytest.fixture
def manifest() -> Manifest:
    return tiny_manifest()


def with_prompts(manifest: Manifest) -> Manifest:
    recipe = msgspec.structs.replace(manifest.recipe, precision="int8")
    own = PromptGraph(graph="prompts.onnx", data="prompts.onnx.data", recipe=recipe)
    return msgspec.structs.replace(manifest, prompts=own)


def with_int8(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, int8_cache=INT8)


def chosen(manifest: Manifest, **config: Any) -> GraphChoice:
    return choose_graphs(manifest, SessionConfig(**config))


def names(choice: GraphChoice) -> list[str]:
    return [file.name for file in choice.files]


def test_one_graph_takes_prompts_and_decodes(manifest: Manifest) -> None:
    choice = chosen(manifest)
    assert names(choice) == [manifest.graph]
    assert (choice.prompts, choice.int8_cache, choice.kv) == (None, None, manifest.kv)
    assert not choice.converts_prompts


def test_a_graph_for_prompts_is_loaded_with_weights_of_its_own(manifest: Manifest) -> None:
    both = with_prompts(manifest)
    choice = chosen(both)
    assert names(choice) == [manifest.graph, "prompts.onnx"]
    assert [file.own_data for file in choice.files] == [None, "prompts.onnx.data"]
    assert [recipe.precision for recipe in choice.recipes] == [manifest.recipe.precision, "int8"]
    assert choice.prompt_recipe.precision == "int8"
    assert not choice.converts_prompts


def test_over_an_int8_cache_prompts_are_computed_on_the_first_graph_and_converted(manifest: Manifest) -> None:
    choice = chosen(with_int8(manifest))
    assert names(choice) == ["int8.onnx", manifest.graph]
    assert (choice.kv.dtype, choice.int8_cache) == ("int8", INT8)
    assert choice.converts_prompts


def test_an_int8_cache_is_left_for_the_artifacts_own_type(manifest: Manifest) -> None:
    choice = chosen(with_int8(manifest), kv_dtype=manifest.kv.dtype)
    assert (names(choice), choice.kv, choice.int8_cache) == ([manifest.graph], manifest.kv, None)


def test_over_an_int8_cache_the_graph_for_prompts_takes_them(manifest: Manifest) -> None:
    choice = chosen(with_int8(with_prompts(manifest)))
    assert names(choice) == ["int8.onnx", "prompts.onnx"]
    assert choice.converts_prompts


@pytest.mark.parametrize("make", [with_prompts, with_int8])
def test_a_single_graph_decodes_and_takes_prompts(manifest: Manifest, make: Any) -> None:
    choice = chosen(make(manifest), single_graph=True)
    assert len(choice.files) == 1
    assert not choice.converts_prompts


def test_what_has_no_effect_or_no_graph_is_refused(manifest: Manifest) -> None:
    with pytest.raises(UsageError, match="--single-graph has no effect here"):
        chosen(manifest, single_graph=True)
    with pytest.raises(UsageError, match=f"this artifact has graphs for {manifest.kv.dtype}"):
        chosen(manifest, kv_dtype="int8")
