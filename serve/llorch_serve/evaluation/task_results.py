"""What lm-eval returns for a task, as a part of our document."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from llorch_serve.bench.schema import Better
from llorch_serve.evaluation.schema import Metric, TaskResult


def task_result(name: str, found: dict[str, Any]) -> TaskResult:
    """Return what a task or group found. found: what lm-eval's ``evaluate`` returns."""
    values = found["results"][name]
    samples: list[dict[str, Any]] = found["samples"].get(name, [])
    counts = found["n-samples"].get(name)
    version = found["versions"].get(name)
    directions = found["higher_is_better"].get(name) or {}
    metrics = []
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        metrics.append(
            Metric(
                name=metric,
                filter=kind,
                value=_number(value),
                stderr=_number(values.get(f"{metric}_stderr,{kind}")),
                better=_better(directions.get(metric)),
                samples=_values(samples, metric, kind, _number(value)),
            )
        )
    return TaskResult(
        task=name,
        version=None if version in (None, "Yaml") else str(version),  # its word for none
        shots=found["n-shot"].get(name),
        n=int(values.get("sample_len", 0)) if counts is None else counts["effective"],
        of=None if counts is None else counts["original"],
        samples_sha256=_samples_hash(samples) if samples else None,
        metrics=tuple(metrics),
    )


def _better(higher: bool | None) -> Better | None:
    return None if higher is None else "higher" if higher else "lower"


def _number(value: object) -> float | None:
    """Return a figure; None where lm-eval gives a text, such as N/A, or what JSON has no number for."""
    if isinstance(value, (bool, int, float, np.number)) and math.isfinite(float(value)):
        return float(value)
    return None


def _values(
    samples: Sequence[dict[str, Any]], metric: str, kind: str, mean: float | None
) -> tuple[float, ...] | None:
    """Return each question's value; None unless the metric is their mean."""
    found = [_number(one.get(metric)) for one in samples if one["filter"] == kind and metric in one]
    values = [value for value in found if value is not None]
    if mean is None or not values or len(values) != len(found):
        return None
    return tuple(values) if math.isclose(math.fsum(values) / len(values), mean, abs_tol=1e-9) else None


def _samples_hash(samples: Sequence[dict[str, Any]]) -> str:
    """Return a hash of the questions that were asked, and how."""
    digest = hashlib.sha256()
    for one in samples:
        digest.update(f"{one['doc_id']} {one['doc_hash']} {one['prompt_hash']} {one['filter']}\n".encode())
    return digest.hexdigest()
