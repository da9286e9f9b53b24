"""A run in Markdown: machine, medians, ratios, what was asked and what was found; and the places in a page
for such text.
"""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Sequence
from typing import Final

from bench_peers.asked import Verdict, verdicts
from bench_peers.contestant import Closeness
from bench_peers.machine import describe
from bench_peers.results import (
    METRICS,
    Metric,
    Ratio,
    Run,
    Subject,
    first_tokens,
    peak_mib,
    ratio,
    series,
)
from llorch_serve.errors import UsageError

COMMAND: Final = "command to first token, s"
_HEADING: Final = re.compile("^### ", re.MULTILINE)


def markers(by: str) -> tuple[str, str]:
    """Return the lines around the figures that the script ``by`` writes into a page."""
    return f"<!-- figures: written by {by} -->", f"<!-- end of figures by {by} -->"


def replace_section(page: str, section: str, *, by: str = "ci/bench") -> str:
    """Return the page with what stands between the markers replaced. Raises UsageError if they are not there
    once each.
    """
    begin, end = markers(by)
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise UsageError(
            f"the page must have the lines {begin} and {end} once, in this order; put them where figures go"
        )
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{_wrapped(section.strip())}\n\n{end}{rest.split(end)[1]}"


def replace_kind(page: str, kind: str, text: str, *, by: str) -> str:
    """Return the page with a kind of machine's figures between the markers, in the place of its last ones.

    Other kinds' figures, each under the kind's heading, stay. Raises UsageError as ``replace_section``.
    """
    begin, end = markers(by)
    before, *kept = _HEADING.split(page.partition(begin)[2].partition(end)[0])
    if before.strip():
        raise UsageError(f"figures of {by} stand under a heading of their kind of machine; found some before")
    kinds = dict(one.split("\n", 1) for one in kept) | {kind: text}
    found = "\n\n".join(f"### {name}\n\n{kinds[name].strip()}" for name in sorted(kinds))
    return replace_section(page, found, by=by)


def _wrapped(text: str) -> str:
    """Return Markdown whose sentences and lists are as wide as documents are; tables and links stay."""
    lines = []
    for line in text.split("\n"):
        whole = not line or line.startswith(("|", "#", "!")) or "](" in line
        indent = "  " if line.startswith("- ") else ""
        lines += (
            [line]
            if whole
            else textwrap.wrap(
                line, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        )
    return "\n".join(lines)


def one_run(run: Run, picture: str) -> str:
    """Return what one run found, in text and tables; ``picture`` is the image's path beside the page."""
    return "\n\n".join(
        (
            _conditions(run),
            f"![Speed against divergence]({picture})",
            "### Medians",
            _medians(run),
            "### Ratios of medians, ours to each peer's",
            _ratios(run),
            "### What was compared",
            _verdicts(verdicts(run)),
        )
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def show_median(values: Sequence[float]) -> str:
    """Return the median of some figures; nothing if there are none."""
    return f"{statistics.median(values):.1f}" if values else ""


def show_closeness(found: Closeness | Subject) -> tuple[str, str]:
    """Return cells: KL and top-1."""
    return f"{found.kl:.2g}", f"{found.top1:.1%}"


def show_ratio(found: Ratio) -> str:
    """Return a ratio with its spread over the rounds."""
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def _conditions(run: Run) -> str:
    machine = run.machine
    rounds = f"{len(run.rounds)} round{'s' if len(run.rounds) > 1 else ''}"
    return (
        f"{run.date}, `{run.command}`: {describe(machine)}, "
        f"{machine.memory_gib:.0f} GiB, "
        f"{machine.system}; load before the run {machine.load:.2f}. {run.prompt_tokens} prompt tokens and "
        f"{run.new_tokens} greedy tokens a stream, {run.threads} threads, {rounds}. KL and top-1 over "
        f"{run.positions} tokens of the English sample, against {run.oracle}."
    )


def _medians(run: Run) -> str:
    header = (
        "",
        "KL, nats",
        "top-1",
        *(f"{metric}, tokens/s" for metric in METRICS),
        "peak MiB",
        COMMAND,
    )
    rows = []
    for subject in run.subjects:
        speeds = [show_median(series(run, subject.label, metric)) for metric in METRICS]
        peak = peak_mib(run, subject.label)
        shown = "" if peak is None else f"{peak:.0f}"
        started = first_tokens(run, subject.label)
        first = f"{statistics.median(started):.2f}" if started else ""
        rows.append((_named(subject), *show_closeness(subject), *speeds, shown, first))
    versions = [f"- {_named(subject)}: {subject.made}; {subject.version}" for subject in run.subjects]
    return table(header, rows) + "\n\n" + "\n".join(versions)


def _named(subject: Subject) -> str:
    return f"**{subject.label}**" if subject.ours else subject.label


def _ratios(run: Run) -> str:
    peers = run.of(ours=False)
    rows = [
        (f"**{subject.label}**: {metric}", *(_against(run, subject, peer, metric) for peer in peers))
        for metric in METRICS
        for subject in run.of(ours=True)
        if series(run, subject.label, metric)
    ]
    if run.first_token_s:
        rows += [
            (f"**{subject.label}**: {COMMAND}", *(_starts(run, subject, peer) for peer in peers))
            for subject in run.of(ours=True)
        ]
    return table(("", *(peer.label for peer in peers)), rows)


def _against(run: Run, subject: Subject, peer: Subject, metric: Metric) -> str:
    theirs = series(run, peer.label, metric)
    return show_ratio(ratio(series(run, subject.label, metric), theirs)) if theirs else ""


def _starts(run: Run, subject: Subject, peer: Subject) -> str:
    return show_ratio(ratio(first_tokens(run, subject.label), first_tokens(run, peer.label)))


def _verdicts(rows: Sequence[Verdict]) -> str:
    header = ("figure", "at", "compared", "asked", "measured", "holds")
    return table(header, [_row(row) for row in rows])


def _row(row: Verdict) -> tuple[str, ...]:
    found = "not measured" if row.found is None else show_ratio(row.found)
    noted = f"{found}; {row.note}" if row.note else found
    return row.figure, row.condition, row.compared, row.asked, noted, show_holds(row.holds)


def show_holds(holds: bool) -> str:
    """Return whether what was asked holds."""
    return "yes" if holds else "**no**"
