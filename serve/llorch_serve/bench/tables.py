"""Reports as text: tables for terminals, of one report or of two compared, Markdown, and CSV with a line for
each figure.
"""

from __future__ import annotations

import csv
import io

from msgspec import to_builtins

from llorch_serve.bench import wording
from llorch_serve.bench.comparison import Comparison
from llorch_serve.bench.schema import Report, Row
from llorch_serve.bench.serving.blocks import describe_row, is_load
from llorch_serve.bench.verdict import verdict

_FAILED = "failed"


def terminal(report: Report) -> str:
    """Return lines for a terminal: what was measured, then a table of all tests."""
    lines = [f"llorch {report.version} on {wording.describe_host(report)}; {wording.describe_runs(report)}"]
    lines += [
        f"{entry.label}: " + "; ".join(_short(name, value) for name, value in wording.facts(entry))
        for entry in report.entries
    ]
    lines.append("")
    if all(is_load(row) for entry in report.entries for row in entry.rows):
        blocks = [describe_row(row) for entry in report.entries for row in entry.rows]
        return "\n".join([*lines, *blocks])
    table = _table(report)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
        lines.append("  ".join(left + right).rstrip())
    lines += [*_reasons(report), *verdict(report)]
    return "\n".join(lines) + "\n"


def markdown(report: Report) -> str:
    """Return a section of Markdown with the same content."""
    lines = [
        f"llorch {report.version}, {report.created}, on {wording.describe_host(report)}: "
        f"{wording.describe_runs(report)}.",
        "",
        *(f"- {_cell(sentence)}" for sentence in verdict(report)),
        "",
    ]
    head, *rows = _table(report)
    lines += [_pipes(head), _pipes(["---", "---", *("---:" for _ in head[2:])])]
    lines += [_pipes(cells) for cells in rows]
    lines.append("")
    for entry in report.entries:
        known = "; ".join(f"{name} {_cell(value)}" for name, value in wording.facts(entry))
        lines.append(f"- **{_cell(entry.label)}**: {known}")
    return "\n".join([*lines, *(f"- {_cell(line)}" for line in _reasons(report))]) + "\n"


def comma_separated(report: Report) -> str:
    """Return CSV: a line for each figure of each row; one without figures for what failed, with its
    reason.
    """
    tests = [to_builtins(test) for test in wording.tests_of(report)]
    fields = list(dict.fromkeys(name for test in tests for name in test))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["entry", "provider", *fields, "figure", "unit", "better", "median", "low", "high", "runs", "problem"]
    )
    for entry in report.entries:
        if entry.problem is not None:
            writer.writerow(
                [entry.label, entry.provider, *("" for _ in fields), *([""] * 7), entry.problem.message]
            )
        for row in entry.rows:
            test = to_builtins(row.test)
            where = [entry.label, entry.provider, *(_plain(test.get(name)) for name in fields)]
            for name, found in row.figures.items():
                values = [found.median, found.low, found.high, len(found.values)]
                writer.writerow([*where, name, found.unit, found.better or "", *values, ""])
            if row.problem is not None:
                writer.writerow([*where, *([""] * 7), row.problem.message])
    return text.getvalue()


def compared(found: Comparison) -> str:
    """Return a comparison as lines for a terminal: notes, every ratio, failures, the outcome."""
    lines = [f"note: {note}" for note in found.notes]
    cells = [["entry", "test", "figure", "before", "after", "ratio", "of any run", ""]]
    label = test = ""
    for one in found.ratios:
        name = wording.describe_test(one.test)
        first = (one.label, name) != (label, test)
        label, test = one.label, name
        verdict = "" if not one.judged else "ok" if one.passed else f"below {found.fail_under:g}"
        within = "" if not one.low <= 1 <= one.high else " (within spread)"
        cells.append(
            [
                one.label if first else "",
                name if first else "",
                f"{wording.title(one.figure)}, {wording.UNITS.get(one.unit, one.unit)}",
                wording.amount(one.before.median),
                wording.amount(one.after.median),
                f"{one.ratio:.3f}",
                f"{one.low:.3f}..{one.high:.3f}{within}",
                verdict,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    lines += [f"failed: {failure}" for failure in found.failures]
    below = sum(not one.passed for one in found.ratios)
    judged = sum(one.judged for one in found.ratios)
    verdict = "passed" if found.passed else "failed"
    lines.append(
        f"{verdict}: {below} of {wording.count(judged, 'judged figure')} below "
        f"{found.fail_under:g}, {wording.count(len(found.failures), 'other failure')}"
    )
    return "\n".join(lines) + "\n"


def _table(report: Report) -> list[list[str]]:
    """Return the heading and a line for each test and entry; the test's name stands before its first one
    alone.
    """
    columns = wording.columns(row for entry in report.entries for row in entry.rows)
    lines = [["test", "entry", *(wording.heading(name, found) for name, found in columns.items())]]
    for test in wording.tests_of(report):
        name = wording.describe_test(test)
        for entry in report.entries:
            row = wording.row_of(entry, test)
            lines.append([name, entry.label, *(_figure(row, column) for column in columns)])
            name = ""
    return lines


def _figure(row: Row | None, column: str) -> str:
    if row is None or row.problem is not None:
        return _FAILED
    return wording.spread(row.figures[column]) if column in row.figures else ""


def _reasons(report: Report) -> list[str]:
    """Return why single tests failed, each reason once."""
    return list(
        dict.fromkeys(
            f"{entry.label}, {wording.describe_test(row.test)}: {row.problem.message}"
            for entry in report.entries
            for row in entry.rows
            if row.problem is not None
        )
    )


def _short(name: str, value: str) -> str:
    return value if name in ("model", "provider", "placement") else f"{name} {value}"


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return " ".join(f"{key}={limit:g}" for key, limit in value.items())
    return "" if value is None else value


def _pipes(cells: list[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Return text that stands in Markdown as it is."""
    for sign in "\\|*_<`":
        text = text.replace(sign, f"\\{sign}")
    return text
