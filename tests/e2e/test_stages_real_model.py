"""SmolLM2 in stages: bits over a hundred steps, answers of the default recipe, and what each stage reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llorch_serve.artifact.folder import Artifact, load_artifact
from llorch_serve.text.tokenizer import Tokenizer
from support.harness.stage_chain import Array, Chain, GraphOf, decode_graph, first_graph, prompts_graph

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

Exports = Callable[..., Path]
MOST_READ = {"2": 0.62, "3": 0.45}
"""Of all weights, the part that one stage may have."""


def greedy(artifact: Artifact, graph: GraphOf = first_graph, **cache: object) -> tuple[list[int], Array]:
    """Return 101 ids and the logits that they were taken from."""
    chain = Chain(artifact, 256, graph, **cache)  # type: ignore[arg-type]  # the cache's type alone
    tokenizer = Tokenizer.load(artifact.tokenizer_path)
    ids = tokenizer.encode("The history of the steam engine begins with", add_special_tokens=True)
    found, logits = list(ids), []
    rows = chain.run(ids, 0)
    for _ in range(101):
        logits.append(rows[-1].copy())
        found.append(int(rows[-1].argmax()))
        rows = chain.run(found[-1:], len(found) - 1)
    return found[len(ids) :], np.stack(logits)


def weights(artifact: Artifact, names: set[str]) -> int:
    return sum(entry.bytes for entry in artifact.manifest.files if entry.path in names)


@pytest.mark.parametrize("stages", ["2", "3"])
@pytest.mark.parametrize(
    "flags", [("fp32",), ("int8", "--recipe", "cpu-calibrated")], ids=["fp32", "default"]
)
def test_stages_answer_as_the_whole_does(smollm2: Exports, flags: tuple[str, ...], stages: str) -> None:
    whole = load_artifact(smollm2(*flags))
    staged = load_artifact(smollm2(*flags, "--stages", stages))
    graphs: list[tuple[GraphOf, dict[str, object]]] = [(first_graph, {})]
    if whole.manifest.prompts is not None:
        graphs += [(prompts_graph, {}), (decode_graph, {"kv_dtype": "int8"})]
    for graph, cache in graphs:
        ids, logits = greedy(whole, graph, **cache)
        staged_ids, staged_logits = greedy(staged, graph, **cache)
        assert staged_ids == ids
        np.testing.assert_array_equal(staged_logits.view(np.uint8), logits.view(np.uint8))
    every = {entry.path for entry in whole.manifest.files if entry.path.endswith(".data")}
    for stage in staged.manifest.stages or ():
        read = {name for name in stage.files if name.endswith(".data")}
        assert weights(staged, read) <= MOST_READ[stages] * weights(whole, every)
