"""A run as a picture: each speed against divergence, ours and the peers', with the extremes over the
rounds.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench_peers.results import METRICS, Metric, Run, Subject, series
from llorch_serve.errors import ResourceError


def draw(run: Run, path: Path) -> None:
    """Write a PNG with a panel for each speed. Raises ResourceError if it cannot be written."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    for panel, metric in enumerate(METRICS):
        axes = figure.add_subplot(2, 2, panel + 1)
        for ours, marker in ((True, "o"), (False, "s")):
            _points(axes, run, run.of(ours=ours), metric, marker)
        axes.set(title=str(metric), xlabel="KL(fp32 || model), nats", ylabel="tokens/s", xscale="log")
        axes.margins(x=0.35, y=0.15)  # room for labels
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    # Below all panels, where it hides no point.
    found = [axes.get_legend_handles_labels() for axes in figure.axes]
    names = {name: handle for shown in found for handle, name in zip(*shown, strict=True)}
    figure.legend(names.values(), names.keys(), loc="outside lower center", ncols=2)
    try:
        # No date or version of the library inside, so that the same figures give the same file.
        figure.savefig(path, dpi=110, format="png", metadata={"Software": None})
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error.strerror}") from error


def _points(axes: Any, run: Run, subjects: list[Subject], metric: Metric, marker: str) -> None:
    found = [(one, values) for one in subjects if (values := series(run, one.label, metric))]
    if not found:
        return
    middles = [statistics.median(values) for _, values in found]
    spread = [
        [middle - min(values) for middle, (_, values) in zip(middles, found, strict=True)],
        [max(values) - middle for middle, (_, values) in zip(middles, found, strict=True)],
    ]
    at = [one.kl for one, _ in found]
    name = "llorch" if subjects[0].ours else "peers"
    axes.errorbar(at, middles, yerr=spread, fmt=marker, capsize=3, label=name)
    for x, y, (one, _) in zip(at, middles, found, strict=True):
        axes.annotate(one.label, (x, y), xytext=(6, 4), textcoords="offset points", fontsize=8)
