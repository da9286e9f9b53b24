"""The picture of the frontier: labels of points that are near each other stand apart."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from llorch_export.frontier.measure import OURS, Point

CROWD = [Point(f"recipe {n}", 4.84 + 0.01 * n, 5e-4 * (1 + 0.03 * n), 0.97, OURS) for n in range(6)]
APART = [Point("int8", 9.0, 4e-5, 0.99, OURS), Point("Q4_0.gguf", 4.7, 7e-4, 0.96, "llama.cpp")]


def test_labels_cover_neither_each_other_nor_a_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from llorch_export.frontier.picture import draw

    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: object, **kwargs: object) -> None:
        drawn.append(figure)
        save(figure, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    draw([*CROWD, *APART], tmp_path / "picture.png")
    (figure,) = drawn
    figure.canvas.draw()
    (axes,) = figure.axes
    labels = axes.texts
    assert [label.get_text() for label in labels] == [*(point.label for point in CROWD), "int8", "Q4_0"]
    boxes = [label.get_window_extent() for label in labels]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    points = [axes.transData.transform(label.xy) for label in labels]  # type: ignore[attr-defined]
    assert not any(box.contains(*point) for box in boxes for point in points)
