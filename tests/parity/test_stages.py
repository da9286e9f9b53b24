"""A model in stages computes the bits of the model in one graph: its graphs are run one after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.graph.stage_choice import parse_stages
from llorch_serve.artifact.folder import Artifact
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, random_ids
from support.harness.stage_chain import Array, Chain, GraphOf, first_graph

LAYERS = {"num_hidden_layers": 4}
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
