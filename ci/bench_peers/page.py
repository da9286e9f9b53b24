"""``docs/performance.md``: figures of each script and kind of machine in their places, and the runs of all
kinds as the section of ``ci/bench``: what was asked, side by side, then each kind by itself.

``python -m bench_peers.page``, which is ``ci/bench --page``, makes the page anew of the document that is
there, after a change of what is asked or shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench_peers.asked import Verdict, verdicts
from bench_peers.machine import kind_of, slug_of
from bench_peers.markdown import one_run, replace_kind, replace_section, show_holds, show_ratio, table
from bench_peers.results import Machine, Run, read_runs
from llorch_serve.terminal.console import say

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
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


def put(text: str, machine: Machine, *, by: str) -> None:
    """Write what the script ``by`` found into the page, in the place of its last figures on that kind of
    machine.

    Raises as :func:`bench_peers.markdown.replace_kind`.
    """
    page = replace_kind(PAGE.read_text(encoding="utf-8"), kind_of(machine), text, by=by)
    PAGE.write_text(page, encoding="utf-8")
    say(f"{PAGE} is written")


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
    return f"{row.compared if row.found is None else show_ratio(row.found)}: {show_holds(row.holds)}"


def main() -> None:
    """Write docs/performance.md anew."""
    PAGE.write_text(written(PAGE.parent, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
