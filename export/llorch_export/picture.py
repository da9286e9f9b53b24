"""Points of :mod:`llorch_export.frontier` as a PNG: bits per weight across, divergence upwards (extra: report)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from llorch_export.frontier import OURS, WIDENED, Point
from llorch_serve.errors import ResourceError

_MARKERS: Final = {OURS: "o", WIDENED: "s"}
_OTHERS: Final = "^"


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw each series with a marker of its own. Raises ResourceError if ``path`` cannot be written."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.add_subplot()
    for series in dict.fromkeys(point.series for point in points):
        chosen = [point for point in points if point.series == series]
        drawn = axes.scatter(
            [point.bits_per_weight for point in chosen],
            [point.kl for point in chosen],
            marker=_MARKERS.get(series, _OTHERS),
            label=series,
        )
        for point in chosen:
            axes.annotate(
                point.label.removesuffix(".gguf"),
                (point.bits_per_weight, point.kl),
                xytext=(4, 3),
                textcoords="offset points",
                fontsize=6,
                color=drawn.get_facecolor()[0],
            )
    axes.set(xlabel="bits per weight", ylabel="KL(fp32 || model), nats", yscale="log")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        # No date or version of the library inside, so that the same figures give the same file.
        figure.savefig(path, dpi=120, format="png", metadata={"Software": None})
    except OSError as error:
        raise ResourceError(f"--png {path} cannot be written: {error.strerror}") from error
