"""Points of :mod:`llorch_export.frontier.measure` as a PNG: bits per weight across, divergence upwards
(extra: report).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from llorch_export.frontier.measure import OURS, WIDENED, Point
from llorch_serve.errors import ResourceError
from llorch_serve.files.durable import write_whole

_MARKERS: Final = {OURS: "o", WIDENED: "s"}
_OTHERS: Final = "^"
_SIDES: Final[tuple[tuple[int, Literal["left", "right"]], ...]] = ((5, "left"), (-5, "right"))
_PLACES: Final = tuple((x, y, side) for y in (2, -8, 10, -16, 18, -24, 26, -32, 34) for x, side in _SIDES)
"""Where a label may stand from its point, in points and by its near side, best first."""

_MARKER: Final = 4.0  # pixels around a point's middle that no label covers


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of a picture. label: beside it. series: marks of one share a form and a colour."""

    label: str
    x: float
    y: float
    series: str


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw each series with a marker of its own. Raises ResourceError if ``path`` cannot be written."""
    marks = [
        Mark(point.label.removesuffix(".gguf"), point.bits_per_weight, point.kl, point.series)
        for point in points
    ]
    draw_marks(marks, path, x="bits per weight", y="KL(fp32 || model), nats")


def draw_marks(marks: Sequence[Mark], path: Path, *, x: str, y: str) -> None:
    """Draw marks over axes that are named ``x`` and, by its logarithm, ``y``. Raises as :func:`draw`."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.add_subplot()
    labels: list[Annotation] = []
    for series in dict.fromkeys(mark.series for mark in marks):
        chosen = [mark for mark in marks if mark.series == series]
        drawn = axes.scatter(
            [mark.x for mark in chosen],
            [mark.y for mark in chosen],
            marker=_MARKERS.get(series, _OTHERS),
            label=series,
        )
        labels += [
            axes.annotate(
                mark.label,
                (mark.x, mark.y),
                xytext=_PLACES[0][:2],
                textcoords="offset points",
                fontsize=6,
                color=drawn.get_facecolor()[0],
            )
            for mark in chosen
        ]
    axes.set(xlabel=x, ylabel=y, yscale="log")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.draw_without_rendering()  # so that places are known in pixels
    _part(axes, labels)
    drawn_bytes = io.BytesIO()
    # No date or version of the library inside, so that the same figures give the same file.
    figure.savefig(drawn_bytes, dpi=120, format="png", metadata={"Software": None})
    try:
        write_whole(path, drawn_bytes.getvalue())
    except OSError as error:
        raise ResourceError(f"--png {path} cannot be written: {error.strerror}") from error


def _part(axes: Axes, labels: Sequence[Annotation]) -> None:
    """Move each label to the first place where it covers no point and no label before it; the first place if
    there is none.
    """
    middles = [axes.transData.transform(label.xy) for label in labels]
    taken = [Bbox.from_extents(x - _MARKER, y - _MARKER, x + _MARKER, y + _MARKER) for x, y in middles]
    for label in labels:
        for x, y, side in (*_PLACES, _PLACES[0]):
            label.set_position((x, y))
            label.set_horizontalalignment(side)
            box = label.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
