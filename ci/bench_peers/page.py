"""The runs of all kinds of machine as the section that ``ci/bench`` writes into its page: what was asked,
side by side, then each kind by itself.

``python -m bench_peers.page``, which is ``ci/bench --page``, makes the page anew of the document that is
there, after a change of what is asked or shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench_peers.asked import Verdict, verdicts
from bench_peers.machine import kind_of, slug_of
from bench_peers.markdown import one_run, replace_section, show_holds, show_ratio, table
from bench_peers.results import Run, read_runs

DOCUMENT: Final = "performance.json"
"""Beside the page: what its figures are made of."""


def with_run(runs: Sequence[Run], run: Run) -> list[Run]:
    """Return the runs with this one in the place of the last on its kind of machine, by the kinds' names."""
    kinds = {kind_of(one.machine): one for one in (*runs, run)}
    return [kinds[kind] for kind in sorted(kinds)]


def written(folder: Path, page: str) -> str:
    """Return the page with the figures of the document in a folder.

    Raises UsageError if the page has no place for them, or the document is of another version.
    """
    return replace_section(page, section(read_runs(folder / DOCUMENT)))


def picture_of(run: Run) -> str:
    """Return the name of a run's picture, beside the page."""
    return f"performance-{slug_of(kind_of(run.machine))}.png"


def section(runs: Sequence[Run]) -> str:
    """Return the section about at least one run, each of another kind of machine."""
    parts = [f"## Asked and measured\n\n{_side_by_side(runs)}"]
    parts += [f"## {kind_of(run.machine)}\n\n{one_run(run, picture_of(run))}" for run in runs]
    return "\n\n".join(parts) + "\n"


def _side_by_side(runs: Sequence[Run]) -> str:
    judged = [{(row.figure, row.condition, row.asked): row for row in verdicts(run)} for run in runs]
    asked = dict.fromkeys(key for rows in judged for key in rows)
    header = ("figure", "at", "asked", *(kind_of(run.machine) for run in runs))
    return table(header, [(*key, *(_cell(rows.get(key)) for rows in judged)) for key in asked])


def _cell(row: Verdict | None) -> str:
    if row is None:
        return ""
    return f"{row.compared if row.found is None else show_ratio(row.found)}: {show_holds(row)}"


def main() -> None:
    """Write docs/performance.md anew."""
    page = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
    page.write_text(written(page.parent, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
