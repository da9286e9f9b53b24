"""The part of ``llorch verify`` that shows a proof layer by layer: a row for each kind of stage, then the
verdict.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from llorch_export.adapter.choice import AdapterChoice
from llorch_export.verify.layers.original_basis import RESTORED
from llorch_export.verify.layers.stages import Kind, Measure, Stage
from llorch_export.verify.layers.verify import LayerReport, verify_layers
from llorch_serve.terminal.console import byte_progress, fail, say, write, write_json

_NAMES: Final = 6  # values that were not compared that are named


def show_layers(
    artifact: Path, against: str, *, lora: tuple[AdapterChoice, ...], llama_cpp: bool, as_json: bool
) -> bool:
    """Prove an artifact and print the result; tell whether every stage is within its tolerance."""
    with byte_progress() as progress:
        report = verify_layers(artifact, against, progress, lora=lora, llama_cpp=llama_cpp)
    if not report.same_source:
        say(f"note: {artifact} was exported from other files than {against}")
    if as_json:
        write_json(report)
    else:
        write(table(report))
    if report.first_departing is not None:
        stage = report.first_departing
        fail(
            f"first departing stage: {stage.kind}, {stage.name}: {_distance(stage)} beyond {stage.limit:g}", 1
        )
    return report.passed


def table(report: LayerReport) -> str:
    """Return the report as lines of text: of each kind of stage, the worst."""
    lines = [
        f"{'stage':<17} {'compared':>8} {'beyond':>6} {'worst':>19} {'tolerance':>9} {'max abs':>9} "
        f"{'cosine':>9}  at"
    ]
    for kind in Kind:
        stages = [stage for stage in report.stages if stage.kind is kind]
        if stages:
            lines.append(_row(kind, stages))
    lines.append(
        f"{len(report.stages)} stages over {report.prompt_tokens} tokens of {report.text} text and "
        f"{report.greedy_tokens} greedy tokens, against {report.oracle}"
    )
    recomputed = [stage for stage in report.stages if stage.source == "recomputed"]
    kinds = ", ".join(kind for kind in Kind if kind in {stage.kind for stage in recomputed})
    lines.append(
        f"observed in the shipped graph, but for {len(recomputed)} recomputed in numpy from what was "
        f"observed ({kinds}); "
        f"showing inner values moves the logits by {report.observer_effect:.2g}"
    )
    if turned := sum(stage.source == RESTORED for stage in report.stages):
        lines.append(
            f"{turned} of them were turned back into the checkpoint's basis, from that of the recipe's "
            f"transforms"
        )
    if report.rescaled:
        lines.append(f"scaled by what a transform measured, so not compared: {_listed(report.rescaled)}")
    if report.not_compared:
        lines.append(f"without counterpart in the reference: {_listed(report.not_compared)}")
    return "\n".join(lines) + "\n"


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"{', '.join(names[:_NAMES])}{more}"


def _row(kind: Kind, stages: list[Stage]) -> str:
    # NaN is the worst of all, and compares as neither more nor less.
    worst = max(stages, key=lambda stage: (stage.distance != stage.distance, stage.distance))
    beyond = sum(not stage.passed for stage in stages)
    limit = "-" if worst.limit is None else f"{worst.limit:g}"
    largest = _format(sorted((s.max_abs for s in stages if s.max_abs is not None), reverse=True), ".2e")
    cosine = _format(sorted(s.cosine for s in stages if s.cosine is not None), ".6f")
    return (
        f"{kind:<17} {len(stages):>8} {beyond or '-':>6} {_distance(worst):>19} {limit:>9} {largest:>9} "
        f"{cosine:>9}  "
        f"{worst.name}"
    )


def _distance(stage: Stage) -> str:
    if stage.measure is Measure.TOKENS:
        return f"{stage.distance:.0f} tokens differ"
    return f"{stage.distance:.2e} {stage.measure}"


def _format(values: Iterable[float], form: str) -> str:
    """Return the first of the values in order, or a dash for none."""
    return next((f"{value:{form}}" for value in values), "-")
