"""``llorch verify --layers``: every stage of a forward pass against transformers, and the first one that
departs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.adapter.choice import AdapterChoice
from llorch_export.source.open import fingerprint
from llorch_export.verify.divergence import open_source
from llorch_export.verify.layers.graph import GraphRun, run_observed
from llorch_export.verify.layers.llama_cpp import check_llama_cpp, compare_llama_cpp
from llorch_export.verify.layers.matching import pairs, unmatched
from llorch_export.verify.layers.original_basis import RESTORED, in_original_basis, rescaled
from llorch_export.verify.layers.reference import observe
from llorch_export.verify.layers.stages import EXACT, Kind, Stage, compare, judged, tolerance
from llorch_export.verify.reference import Reference
from llorch_export.verify.sample_tokens import token_ids
from llorch_serve.artifact.folder import Artifact, load_artifact
from llorch_serve.artifact.manifest import Recipe
from llorch_serve.config import SessionConfig
from llorch_serve.fidelity.divergence import DivergenceSum, log_softmax
from llorch_serve.loading.models import open_artifact
from llorch_serve.providers import usable_cpus

PROMPT_TOKENS: Final = 64
GREEDY_TOKENS: Final = 32

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What ``llorch verify --layers --json`` prints.

    stages: in the order of computation; first_departing: the first of them beyond its tolerance.
    not_compared: values of the graph for which the reference has no counterpart.
    rescaled: stages that are not compared because a transform scaled them by what it measured on a text.
    observer_effect: largest difference between the shipped graph's logits and those of the copy that shows
        its inner values.
    """

    passed: bool
    first_departing: Stage | None
    stages: tuple[Stage, ...]
    not_compared: tuple[str, ...]
    observer_effect: float
    prompt_tokens: int
    greedy_tokens: int
    text: str
    oracle: str
    recipe: Recipe
    same_source: bool
    rescaled: tuple[str, ...] = ()


def verify_layers(
    folder: Path,
    source: str,
    progress: Callable[[str, int, int], None],
    *,
    lora: Sequence[AdapterChoice] = (),
    llama_cpp: bool = False,
) -> LayerReport:
    """Compare an artifact with the checkpoint it was made from, stage by stage.

    lora: the adapters that were merged into it.
    llama_cpp: compare logits with llama.cpp's too; see :mod:`.llama_cpp` for its errors.
    Raises ArtifactError if either cannot be loaded or their vocabularies differ, ProviderError if the runtime
    does not show the graph's inner values.
    """
    artifact = load_artifact(folder)
    checkpoint = open_source(artifact, source, lora)
    if llama_cpp:
        check_llama_cpp(checkpoint)
    recipe = artifact.manifest.recipe
    ids, kind = token_ids(artifact)
    ids, logits, answer = _answer(artifact, ids)
    progress("proving layers", 1, 4)
    graph = run_observed(artifact, ids, threads=usable_cpus())
    progress("proving layers", 1, 4)
    reference = Reference(checkpoint)
    expected = reference.logits([*ids, *answer])
    progress("proving layers", 1, 4)
    inside = observe(reference.model, ids, checkpoint.config)
    left_out = rescaled(graph, recipe, checkpoint.config)
    restored = in_original_basis(graph, recipe, checkpoint)
    found = [
        compare(name, stage, layer, _source(name, origin, graph, restored), wanted, value, recipe)
        for name, stage, layer, origin, wanted, value in pairs(
            restored, inside, artifact.manifest.kv.head_dim
        )
        if name not in left_out
    ]
    agreement, *outcome = _outcome(expected, logits, answer, recipe)
    second = [compare_llama_cpp(checkpoint, ids, logits, recipe)] if llama_cpp else []
    found += [agreement, *second, *outcome]
    progress("proving layers", 1, 4)
    departing = [stage for stage in found if not stage.passed]
    return LayerReport(
        passed=not departing,
        first_departing=departing[0] if departing else None,
        stages=tuple(found),
        not_compared=unmatched(graph, {stage.name for stage in found}.union(left_out)),
        rescaled=left_out,
        observer_effect=float(np.abs(graph.values["logits"] - logits).max()),
        prompt_tokens=len(ids),
        greedy_tokens=len(answer),
        text=kind,
        oracle=reference.description,
        recipe=recipe,
        same_source=fingerprint(checkpoint) == artifact.manifest.source.fingerprint,
    )


def _source(name: str, origin: str, graph: GraphRun, restored: GraphRun) -> str:
    return RESTORED if graph.values.get(name) is not restored.values.get(name) else origin


def _answer(artifact: Artifact, text: list[int]) -> tuple[list[int], Logits, list[int]]:
    """Run the shipped graph on the beginning of a text.

    Returns the prompt's tokens, its logits and up to GREEDY_TOKENS greedy tokens, each from one decode step.
    """
    context = artifact.manifest.context_length
    ids = text[: min(PROMPT_TOKENS, context - context // 3)]
    steps = min(GREEDY_TOKENS, context - len(ids))
    session = open_artifact(
        artifact, SessionConfig(slots=1, max_context=len(ids) + steps), lambda report: None
    )
    logits = session.prefill(0, ids, 0, range(len(ids))).copy()
    answer = [int(logits[-1].argmax())]
    for step in range(1, steps):
        answer.append(int(session.decode([answer[-1]], [len(ids) + step])[0].argmax()))
    return ids, logits, answer


def _outcome(expected: Logits, logits: Logits, answer: list[int], recipe: Recipe) -> list[Stage]:
    """Compare logits, probabilities and greedy tokens. expected: the reference's, of prompt and answer."""
    prompt = len(logits)
    wanted = expected[:prompt]
    divergence = DivergenceSum()
    divergence.add(wanted, logits)
    probabilities = [np.exp(log_softmax(x)) for x in (wanted, logits)]
    softmax = judged(
        "softmax",
        Kind.SOFTMAX,
        None,
        "recomputed",
        tolerance(Kind.SOFTMAX, recipe),
        divergence.result().kl,
        max_abs=float(np.abs(probabilities[0] - probabilities[1]).max()),
    )
    greedy = judged(
        "greedy",
        Kind.GREEDY,
        None,
        "observed",
        tolerance(Kind.GREEDY, recipe),
        other_choices(expected[prompt - 1 : prompt - 1 + len(answer)], answer),
    )
    return [compare("logits", Kind.LOGITS, None, "observed", wanted, logits, recipe), softmax, greedy]


def other_choices(expected: Logits, answer: list[int]) -> int:
    """Count the tokens that the reference, given all before them, finds less likely than another.

    By induction an answer without such a token is the reference's own greedy answer. Two logits nearer to
    each other than twice the tolerance of logits are a tie, which rounding may break either way.
    """
    chosen = expected[np.arange(len(answer)), answer]
    return int((expected.max(axis=1) - chosen > 2 * EXACT[Kind.LOGITS]).sum())
