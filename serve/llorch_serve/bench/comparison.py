"""Two reports side by side: which rows belong together, by what factor figures differ, and what may not be
compared.

A ratio is above 1 where the second report is better, whichever direction the figure has, so one limit does
for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from llorch_serve.bench import wording
from llorch_serve.bench.schema import Entry, Figure, Report, Row, Test
from llorch_serve.errors import UsageError

_MACHINE: Final = ("cpu", "cpus_allowed", "memory_bytes", "gpus")
"""What of a host decides speed; the rest of it may differ."""

_MEMORY_SLACK: Final = 0.02  # what a kernel reserves differs from start to start


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A figure in both reports.

    ratio: above 1 the second is better. low, high: of any run of one to any run of the other. judged: held
        against the limit.
    """

    label: str
    test: Test
    figure: str
    unit: str
    before: Figure
    after: Figure
    ratio: float
    low: float
    high: float
    judged: bool
    passed: bool


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. failures: why it does not pass, apart from ratios. notes: what a reader should know."""

    fail_under: float
    ratios: tuple[Ratio, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...]
    passed: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """What fails. fail_under: the least ratio.

    figures: names of those that are held against it; none: every speed, and the number of requests that
        failed.
    """

    fail_under: float
    figures: tuple[str, ...] = ()

    def judges(self, name: str, found: Figure) -> bool:
        """Tell whether a figure is held against the limit."""
        if self.figures:
            return name in self.figures
        return name == "failed" or (found.unit.endswith("/s") and found.better == "higher")


def compare_reports(
    before: Report, after: Report, limits: Limits, *, across_machines: bool = False
) -> Comparison:
    """Compare the second report with the first.

    across_machines: reports of different machines too. Raises UsageError for those otherwise, and for reports
        that have
    nothing in common or none of the figures that are to be judged.
    """
    notes = _machines(before, after, across_machines=across_machines)
    failures: list[str] = []
    ratios: list[Ratio] = []
    later = {entry.label: entry for entry in after.entries}
    for entry in before.entries:
        other = later.pop(entry.label, None)
        if other is None:
            if entry.rows:
                failures.append(f"{entry.label} is missing")
            continue
        notes += _differences(entry, other)
        failures += _worse(entry, other)
        ratios += _entry(entry, other, limits, failures, notes)
    notes += [f"{label} is new" for label in later]
    if not ratios:
        raise UsageError(
            "the reports have no figure in common; expected the same providers and tests in both: "
            f"{_content(before)} against {_content(after)}"
        )
    if absent := set(limits.figures) - {ratio.figure for ratio in ratios}:
        known = ", ".join(sorted({ratio.figure for ratio in ratios}))
        raise UsageError(
            f"--figure is {sorted(absent)[0]}, which the reports do not both have; they have {known}"
        )
    passed = not failures and all(ratio.passed for ratio in ratios)
    return Comparison(
        fail_under=limits.fail_under,
        ratios=tuple(ratios),
        failures=tuple(failures),
        notes=tuple(notes),
        passed=passed,
    )


def _entry(before: Entry, after: Entry, limits: Limits, failures: list[str], notes: list[str]) -> list[Ratio]:
    """Return the ratios of an entry's rows; add what is missing to failures, and what is new to notes."""
    ratios: list[Ratio] = []
    later: list[Row] = list(after.rows)
    for row in before.rows:
        other = next((one for one in later if one.test == row.test), None)
        name = f"{before.label}, {wording.describe_test(row.test)}"
        if other is not None:
            later.remove(other)
        if not row.figures:
            continue  # failed before: whatever is there now is no worse
        if other is None or not other.figures:
            why = f": {other.problem.message}" if other is not None and other.problem is not None else ""
            failures.append(f"{name} is missing{why}")
            continue
        for figure, found in row.figures.items():
            if figure not in other.figures:
                notes.append(f"{name} has no {figure} any more")
            elif found.better is not None:
                ratios.append(_ratio(before.label, row.test, figure, (found, other.figures[figure]), limits))
    notes += [f"{before.label}, {wording.describe_test(row.test)} is new" for row in later]
    return ratios


def _ratio(label: str, test: Test, name: str, pair: tuple[Figure, Figure], limits: Limits) -> Ratio:
    before, after = pair
    if before.better == "higher":
        found = (
            _over(after.median, before.median),
            _over(after.low, before.high),
            _over(after.high, before.low),
        )
    else:
        found = (
            _over(before.median, after.median),
            _over(before.low, after.high),
            _over(before.high, after.low),
        )
    judged = limits.judges(name, before)
    return Ratio(
        label=label,
        test=test,
        figure=name,
        unit=before.unit,
        before=before,
        after=after,
        ratio=found[0],
        low=found[1],
        high=found[2],
        judged=judged,
        passed=not judged or found[0] >= limits.fail_under,
    )


def _over(numerator: float, denominator: float) -> float:
    """Return the quotient; 1 of nothing to nothing."""
    if denominator == 0:
        return 1.0 if numerator == 0 else float("inf")
    return numerator / denominator


def _machines(before: Report, after: Report, *, across_machines: bool) -> list[str]:
    differ = [
        f"{name} {_shown(name, first)} and {_shown(name, second)}"
        for name in _MACHINE
        if not _same(name, first := getattr(before.host, name), second := getattr(after.host, name))
    ]
    if not differ:
        return []
    if not across_machines:
        raise UsageError(
            f"the reports are of different machines ({'; '.join(differ)}), whose speeds say nothing of a "
            f"change; "
            "measure both on one, or accept that with --across-machines"
        )
    return [f"different machines: {'; '.join(differ)}"]


def _same(name: str, first: Any, second: Any) -> bool:
    if name == "memory_bytes":
        return bool(abs(first - second) <= _MEMORY_SLACK * max(first, second))
    return bool(first == second)


def _shown(name: str, value: Any) -> str:
    return f"{value / 2**30:.1f} GiB" if name == "memory_bytes" else str(value)


def _differences(before: Entry, after: Entry) -> list[str]:
    """Return what of two entries is not the same, which is what a comparison may be about."""
    pairs: list[tuple[str, object, object]] = [
        ("software", ", ".join(before.software), ", ".join(after.software)),
        ("threads", before.threads, after.threads),
        ("provider", before.provider, after.provider),
    ]
    if before.model is not None and after.model is not None:
        pairs += [
            (name, getattr(before.model, name), getattr(after.model, name))
            for name in ("model_id", "precision", "head_precision", "kv_dtype", "target")
        ]
        pairs.append(("fingerprint", before.model.fingerprint[:12], after.model.fingerprint[:12]))
    return [f"{before.label}: {name} {old} and {new}" for name, old, new in pairs if old != new]


def _worse(before: Entry, after: Entry) -> list[str]:
    """Return what fails whatever the speeds: the second report's failure where the first has none, or a lost
    fidelity.
    """
    found = []
    if after.problem is not None and before.problem is None:
        found.append(f"{after.label} failed: {after.problem.message}")
    if after.fidelity is not None and not after.fidelity.passed:
        if before.fidelity is None or before.fidelity.passed:
            found.append(f"{after.label} departs from its reference: {wording.describe_fidelity(after)}")
    elif before.fidelity is not None and after.fidelity is None:
        found.append(f"{after.label} has no fidelity any more")
    return found


def _content(report: Report) -> str:
    labels: Sequence[str] = [entry.label for entry in report.entries]
    return f"{', '.join(labels)} with {wording.count(len(wording.tests_of(report)), 'test')}"
