"""An evaluation as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from llorch_serve.evaluation.schema import Difference, Evaluation, TextResult, metric_name

VERDICTS: Final = {
    "worse": "worse than noise",
    "better": "better than noise",
    "noise": "within noise",
    "same": "the same",
    "unknown": "no standard error",
}


def terminal(evaluation: Evaluation) -> str:
    """Return everything that was found, in tables with a line of headings each."""
    model = evaluation.model
    lines = [f"{model.model_id}  {model.fingerprint[:12]}  {model.precision}  {model.provider}"]
    parts = [_fidelity(evaluation), _texts(evaluation.texts), _tasks(evaluation), _comparison(evaluation)]
    for part in parts:
        rows = list(part)
        if rows:
            lines += ["", *_aligned(rows)]
    return "\n".join(lines) + "\n"


def _fidelity(evaluation: Evaluation) -> Iterator[Sequence[str]]:
    found = evaluation.fidelity
    if found is None:
        return
    yield ("fidelity", "KL", "limit", "top-1", "tokens")
    if found.measured is msgspec.UNSET:
        yield ("not measured", "-", f"{found.kl_limit:g}", "-", "-")
    else:
        one = found.measured
        yield (one.oracle, f"{one.kl:.3g}", f"{one.limit:g}", f"{one.top1:.2%}", str(one.tokens))


def _texts(texts: Sequence[TextResult]) -> Iterator[Sequence[str]]:
    if texts:
        yield ("text", "tokens", "window/stride", "perplexity", "by word", "by byte", "bits/byte")
    for text in texts:
        error = "" if text.stderr is None else f" ± {text.stderr:.4f}"
        yield (
            text.name,
            str(text.tokens),
            f"{text.window}/{text.stride}",
            _shown(text.perplexity),
            _shown(text.word_perplexity),
            _shown(text.byte_perplexity),
            f"{text.bits_per_byte:.4f}{error}",
        )


def _tasks(evaluation: Evaluation) -> Iterator[Sequence[str]]:
    if evaluation.tasks:
        yield ("task", "version", "shots", "n", "value", "stderr", "better")
    for task in evaluation.tasks:
        for metric in task.metrics:
            yield (
                metric_name(task, metric),
                task.version or "-",
                "-" if task.shots is None else str(task.shots),
                str(task.n),
                _shown(metric.value),
                _shown(metric.stderr),
                metric.better or "-",
            )


def _comparison(evaluation: Evaluation) -> Iterator[Sequence[str]]:
    found = evaluation.comparison
    if found is None:
        return
    yield (f"against {found.model_id} {found.fingerprint[:12]}", "before", "after", "difference", "verdict")
    for one in found.differences:
        yield (one.name, _shown(one.before), _shown(one.after), _moved(one), _verdict(one))


def _moved(one: Difference) -> str:
    if one.difference is None:
        return "-"
    return f"{one.difference:+.4f}" + ("" if one.stderr is None else f" ± {one.stderr:.4f}")


def _verdict(one: Difference) -> str:
    if one.verdict == "incomparable":
        return f"not compared: {one.why}"
    how = "" if one.changed is None else f" ({one.changed} differ)"
    return f"{VERDICTS[one.verdict]}{how}"


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows with columns under each other: names to the left, the last column too, figures right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    for row in rows:
        cells = (
            cell.ljust(width) if place in (0, last) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
