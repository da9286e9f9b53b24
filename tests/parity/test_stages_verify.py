"""``llorch verify`` of a model in stages says what it says of one graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from llorch_export.graph.stage_choice import StageChoice
from llorch_export.verify.divergence import verify
from llorch_export.verify.layers.verify import verify_layers
from llorch_serve.artifact.folder import Artifact
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, silent

Both = tuple[Path, Artifact, Artifact]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Return a source, and what it becomes as one graph and in stages."""
    folder = tmp_path_factory.mktemp("verified")
    source = write_hf_folder(folder / "model", {"num_hidden_layers": 3, "tie_word_embeddings": True})
    whole = export_tiny(source, folder / "whole")
    return source, whole, export_tiny(source, folder / "staged", stages=StageChoice(2, (1,)))


def test_the_divergence_is_that_of_one_graph(both: Both) -> None:
    source, *artifacts = both
    expected, found = (verify(artifact.folder, str(source), silent) for artifact in artifacts)
    assert found.passed
    assert found == expected


def test_layers_on_both_sides_of_a_cut_are_proven(both: Both) -> None:
    source, *artifacts = both
    expected, found = (verify_layers(artifact.folder, str(source), silent) for artifact in artifacts)
    assert found.passed, found.first_departing
    assert [stage.name for stage in found.stages] == [stage.name for stage in expected.stages]
    assert found.not_compared == expected.not_compared
