"""A report as one HTML file for people: what to use, plots as SVG, every figure. No script, no network.

``page.html.jinja`` draws; here numbers become lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import jinja2

from llorch_serve.bench import wording
from llorch_serve.bench.schema import Entry, Figure, OfflineTest, Report, Test
from llorch_serve.bench.verdict import MAIN, Headline, disqualified, headlines, main_figure, overlap, verdict

_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
"""Okabe and Ito's, which people who see no red or green tell apart."""

_BAR_PIXELS: Final = 330.0
_PLOT_PIXELS: Final = (460.0, 240.0)
_LINE_PIXELS: Final = 15.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar. length, low, high: of the median, and where the whisker begins and ends, in pixels; None:
    nothing to draw.
    """

    label: str
    colour: str
    length: float | None
    low: float
    high: float
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """The bars of one test."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Plots of one quantity, which share a scale. lower: small is good."""

    title: str
    unit: str
    lower: bool
    plots: tuple[Plot, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """An entry in the plot of speed against fidelity, in pixels. label_y: where its name stands, beside
    it.
    """

    label: str
    colour: str
    x: float
    y: float
    label_y: float


@dataclass(frozen=True, slots=True)
class Scatter:
    """That plot. ticks: position in pixels and text, of each axis."""

    title: str
    points: tuple[Point, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    width: float = _PLOT_PIXELS[0]
    height: float = _PLOT_PIXELS[1]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the summary. best: of its column. small: said less loudly."""

    text: str
    small: str = ""
    best: bool = False


def html(report: Report) -> str:
    """Return the page."""
    source = files("llorch_serve.bench").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    colours = {entry.label: _COLOURS[index % len(_COLOURS)] for index, entry in enumerate(report.entries)}
    columns = wording.columns(row for entry in report.entries for row in entry.rows)
    return environment.from_string(source).render(
        report=report,
        wording=wording,
        colours=colours,
        host=wording.describe_host(report),
        runs=wording.describe_runs(report),
        verdict=verdict(report),
        disqualified=disqualified,
        summary=_summary(report),
        sections=_sections(report, colours),
        scatter=_scatter(report, colours),
        columns={name: wording.heading(name, found) for name, found in columns.items()},
        bar_pixels=_BAR_PIXELS,
    )


def _summary(report: Report) -> tuple[list[str], list[tuple[Entry, list[Cell]]]]:
    """Return headings, and a line of cells for each entry."""
    shown = headlines(report)
    heads = [headline.words for headline in shown]
    rows: list[list[Cell]] = [[] for _ in report.entries]
    able = [disqualified(entry) is None for entry in report.entries]
    for headline in shown:
        found = [headline.of(entry) for entry in report.entries]
        best = _best([figure if ok else None for figure, ok in zip(found, able, strict=True)])
        for cells, figure in zip(rows, found, strict=True):
            cells.append(_figure_cell(figure, best=figure is not None and figure is best))
    for name, values, texts in _properties(report):
        if not any(texts):
            continue
        heads.append(name)
        usable = [value for value, ok in zip(values, able, strict=True) if ok and value is not None]
        # What reads alike is not better, whatever its further digits.
        several = len({text for text, value in zip(texts, values, strict=True) if value is not None}) > 1
        for cells, value, text, ok in zip(rows, values, texts, able, strict=True):
            is_best = several and ok and value is not None and value == min(usable)
            cells.append(Cell(text or "—", best=is_best))
    return heads, list(zip(report.entries, rows, strict=True))


def _properties(report: Report) -> list[tuple[str, list[float | None], list[str]]]:
    """Return what entries have beside tests: name, values of which the least is the best, texts, empty where
    unknown.
    """
    entries = report.entries
    fidelity = [entry.fidelity for entry in entries]
    disk = [None if entry.model is None else entry.model.folder_bytes for entry in entries]
    own = [
        next((share for share in entry.placement if share.provider == entry.provider), None)
        for entry in entries
    ]
    return [
        (
            "KL, nats (top-1)",
            [None if found is None else found.kl for found in fidelity],
            ["" if found is None else f"{found.kl:.3g} ({found.top1:.1%})" for found in fidelity],
        ),
        (
            "nodes, weights on the provider",
            [None for _ in own],
            ["" if share is None else f"{share.node_share:.1%}, {share.weight_share:.1%}" for share in own],
        ),
        (
            "peak host memory, MiB",
            [entry.peak_rss_mib for entry in entries],
            ["" if entry.peak_rss_mib is None else f"{entry.peak_rss_mib:.0f}" for entry in entries],
        ),
        (
            "on disk, MiB",
            [None if size is None else float(size) for size in disk],
            ["" if size is None else f"{size / 2**20:.0f}" for size in disk],
        ),
        (
            "loads in, s",
            [entry.load_s for entry in entries],
            ["" if entry.load_s is None else wording.amount(entry.load_s) for entry in entries],
        ),
    ]


def _figure_cell(found: Figure | None, *, best: bool) -> Cell:
    if found is None:
        return Cell("—")
    range_ = "" if len(found.values) == 1 else f"{wording.amount(found.low)}..{wording.amount(found.high)}"
    return Cell(f"{wording.amount(found.median)} {wording.UNITS.get(found.unit, found.unit)}", range_, best)


def _best(found: Sequence[Figure | None]) -> Figure | None:
    """Return the best of several if it is that beyond the spread of the runs, else None."""
    there = [figure for figure in found if figure is not None]
    there.sort(key=lambda figure: figure.median if figure.better == "lower" else -figure.median)
    return there[0] if len(there) > 1 and not overlap(there[0], there[1]) else None


def _sections(report: Report, colours: dict[str, str]) -> list[Section]:
    """Return plots of the main figure of every test, then of energy and, of loads, of everything that is
    better or worse.
    """
    wanted: dict[tuple[str, str], list[tuple[Test, str]]] = {}
    for test in wording.tests_of(report):
        main = main_figure(report, test)
        rows = [row for entry in report.entries if (row := wording.row_of(entry, test)) is not None]
        for name, found in wording.columns(rows).items():
            offline = isinstance(test, OfflineTest)
            if name == main or name == "joules_per_token" or (not offline and found.better is not None):
                work: str = test.work if isinstance(test, OfflineTest) and name == MAIN[test.work] else ""
                wanted.setdefault((work, name), []).append((test, name))
    sections = []
    for (work, name), pairs in wanted.items():
        mine = [Headline(test, name) for test, name in pairs]
        figures = [one.of(entry) for one in mine for entry in report.entries]
        there = [found for found in figures if found is not None]
        scale = _BAR_PIXELS / (max(found.high for found in there) or 1.0)
        plots = [_plot(report, one, colours, scale) for one in mine]
        sample = there[0]
        heading = {"prefill": "Prefill", "decode": "Decode", "mixed": "Prefill and decode together"}.get(
            work, wording.title(name)
        )
        unit = wording.UNITS.get(sample.unit, sample.unit)
        sections.append(Section(heading, unit, sample.better == "lower", tuple(plots)))
    return sections


def _plot(report: Report, headline: Headline, colours: dict[str, str], scale: float) -> Plot:
    """Return a test's bars. scale: pixels for each unit of the figure."""
    found = [(entry, headline.of(entry)) for entry in report.entries]
    bars = []
    for entry, figure in found:
        if figure is None:
            row = wording.row_of(entry, headline.test)
            problem = entry.problem if row is None else row.problem
            text = "failed" if problem is not None else "not measured"
            bars.append(Bar(entry.label, colours[entry.label], None, 0, 0, text))
            continue
        bars.append(
            Bar(
                entry.label,
                colours[entry.label],
                figure.median * scale,
                figure.low * scale,
                figure.high * scale,
                wording.amount(figure.median),
            )
        )
    return Plot(headline.words, tuple(bars))


def _scatter(report: Report, colours: dict[str, str]) -> Scatter | None:
    """Return decode speed against divergence, both on logarithmic axes; None unless two entries have both."""
    headline = next((one for one in headlines(report) if one.name == "decode_tokens_per_s"), None)
    if headline is None:
        return None
    pairs = [
        (entry, entry.fidelity.kl, found.median)
        for entry in report.entries
        if entry.fidelity is not None and (found := headline.of(entry)) is not None
        if entry.fidelity.kl > 0 and found.median > 0
    ]
    if len(pairs) < 2:
        return None
    width, height = _PLOT_PIXELS
    x_low, x_high = _decades([kl for _, kl, _ in pairs])
    y_low, y_high = _decades([speed for _, _, speed in pairs])

    def x(value: float) -> float:
        return width * (math.log10(value) - x_low) / (x_high - x_low)

    def y(value: float) -> float:
        return height * (1 - (math.log10(value) - y_low) / (y_high - y_low))

    step = max(1, (x_high - x_low) // 6)
    return Scatter(
        f"{headline.words}, against divergence",
        _points([(entry.label, x(kl), y(speed)) for entry, kl, speed in pairs], colours),
        tuple((x(10.0**power), f"1e{power}") for power in range(x_low, x_high + 1, step)),
        tuple((y(10.0**power), wording.amount(10.0**power)) for power in range(y_low, y_high + 1)),
    )


def _points(places: Sequence[tuple[str, float, float]], colours: dict[str, str]) -> tuple[Point, ...]:
    """Return points whose names do not stand upon each other. places: label, x and y."""
    points: list[Point] = []
    lowest = -_LINE_PIXELS
    for label, x, y in sorted(places, key=lambda place: (place[2], place[1])):
        lowest = max(y, lowest + _LINE_PIXELS)
        points.append(Point(label, colours[label], x, y, lowest))
    return tuple(points)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Return the powers of ten around all values, at least one apart."""
    low = math.floor(math.log10(min(values)))
    return low, max(low + 1, math.ceil(math.log10(max(values))))
