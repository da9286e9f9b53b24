"""Which entry to use: what a report's figures say about that, in sentences, and nothing that they do not
say.
"""

from __future__ import annotations

from dataclasses import dataclass

from llorch_serve.bench import wording
from llorch_serve.bench.schema import Entry, Figure, OfflineTest, Report, ServingTest, Test

MAIN = {"prefill": "prefill_tokens_per_s", "decode": "decode_tokens_per_s", "mixed": "tokens_per_s"}
"""The figure that an offline test is there for."""


@dataclass(frozen=True, slots=True)
class Headline:
    """A figure that entries are compared by at first sight. name: of the figure."""

    test: Test
    name: str

    @property
    def words(self) -> str:
        """Return it in words."""
        return wording.describe_test(self.test)

    def of(self, entry: Entry) -> Figure | None:
        """Return an entry's figure, if it has one."""
        row = wording.row_of(entry, self.test)
        return None if row is None else row.figures.get(self.name)


def headlines(report: Report) -> list[Headline]:
    """Return prefill and decode, with fewest and with most streams, without a filled context if there is such
    a test.

    Of a report without those: the main figure of every test.
    """
    tests = [test for test in wording.tests_of(report) if isinstance(test, OfflineTest)]
    found = []
    for work in ("prefill", "decode"):
        mine = sorted(
            (test for test in tests if test.work == work), key=lambda test: (test.depth, test.streams)
        )
        shallow = [test for test in mine if test.depth == mine[0].depth]
        found += [Headline(test, MAIN[work]) for test in dict.fromkeys((*shallow[:1], *shallow[-1:]))]
    return found or [
        Headline(test, name)
        for test in wording.tests_of(report)
        if (name := main_figure(report, test)) is not None
    ]


def main_figure(report: Report, test: Test) -> str | None:
    """Return the name of the figure that a test is there for: of a load, its first speed."""
    if isinstance(test, OfflineTest):
        return MAIN[test.work]
    assert isinstance(test, ServingTest)
    rows = [row for entry in report.entries if (row := wording.row_of(entry, test)) is not None]
    return next((name for name, found in wording.columns(rows).items() if found.better == "higher"), None)


def disqualified(entry: Entry) -> str | None:
    """Return why an entry is not to be recommended, whatever its speed; None if nothing speaks against it."""
    if entry.problem is not None:
        return f"{entry.label} failed: {entry.problem.message}"
    if entry.fidelity is not None and not entry.fidelity.passed:
        return (
            f"{entry.label} departs from the reference by more than its recipe allows: "
            f"{wording.describe_fidelity(entry)}"
        )
    return None


def verdict(report: Report) -> list[str]:
    """Return sentences for whoever has to choose, the shortest answer first; none where there is nothing to
    choose between.
    """
    if len(report.entries) == 1:
        return []
    able = [entry for entry in report.entries if disqualified(entry) is None]
    compared = [(headline, _ranked(headline, able)) for headline in headlines(report)]
    compared = [(headline, ranked) for headline, ranked in compared if len(ranked) > 1]
    sentences = [_answer(able, compared)]
    sentences += [_sentence(headline, ranked) for headline, ranked in compared]
    if able:
        sentences += _fidelity(able)
    reasons = [disqualified(entry) for entry in report.entries]
    return [
        *sentences,
        *(f"Not considered: {reason.rstrip('.')}." for reason in reasons if reason is not None),
    ]


def _answer(able: list[Entry], compared: list[tuple[Headline, list[Entry]]]) -> str:
    """Return the answer in a sentence: who wins beyond the spread of the runs, and where."""
    if not able:
        return "None of them can be used."
    if len(able) == 1:
        return f"Only {able[0].label} can be used."
    won: dict[str, list[str]] = {}
    for headline, ranked in compared:
        if _clear(headline, ranked):
            won.setdefault(ranked[0].label, []).append(headline.words)
    if not won:
        return "None is faster than the next beyond the spread of its runs."
    if len(won) == 1:
        (label, tests), *_ = won.items()
        where = "each test here" if len(tests) == len(compared) else "; ".join(tests)
        rest = "" if len(tests) == len(compared) else ", and none beyond the spread of the runs elsewhere"
        return f"{label} is the fastest in {where}{rest}."
    listed = [f"{label} is the fastest in {'; '.join(tests)}" for label, tests in won.items()]
    return f"It depends on the work: {'. '.join(listed)}."


def overlap(first: Figure, second: Figure) -> bool:
    """Tell whether the runs of two figures are not all on one side of each other."""
    return first.low <= second.high and second.low <= first.high


def _ranked(headline: Headline, entries: list[Entry]) -> list[Entry]:
    """Return the entries that have the figure, the best first."""
    having = [(entry, found) for entry in entries if (found := headline.of(entry)) is not None]
    lower = any(found.better == "lower" for _, found in having)
    having.sort(key=lambda pair: pair[1].median if lower else -pair[1].median)
    return [entry for entry, _ in having]


def _clear(headline: Headline, ranked: list[Entry]) -> bool:
    """Tell whether the best is better than the next beyond the spread of their runs."""
    best, next_ = headline.of(ranked[0]), headline.of(ranked[1])
    assert best is not None
    assert next_ is not None
    return not overlap(best, next_)


def _sentence(headline: Headline, ranked: list[Entry]) -> str:
    best = headline.of(ranked[0])
    assert best is not None
    unit = wording.UNITS.get(best.unit, best.unit)
    parts = [f"{ranked[0].label} with {wording.amount(best.median)} {unit}"]
    for entry in ranked[1:]:
        found = headline.of(entry)
        assert found is not None
        same = " (within the spread of the runs)" if overlap(best, found) else ""
        parts.append(f"{_times(best, found)} {entry.label}{same}")
    return f"{headline.words}: {', '.join(parts)}."


def _times(best: Figure, other: Figure) -> str:
    """Return how much better a figure is, with as many digits as matter."""
    more, less = (best, other) if best.better == "higher" else (other, best)
    if less.median == 0:
        return "more than"
    ratio = more.median / less.median
    return f"{ratio:.0f} times" if ratio >= 10 else f"{ratio:.2f} times"


def _fidelity(entries: list[Entry]) -> list[str]:
    known = [(entry, entry.fidelity) for entry in entries if entry.fidelity is not None]
    if not known:
        return [
            "Fidelity was not measured: speed alone does not say that the answers are right (--reference)."
        ]
    known.sort(key=lambda pair: pair[1].kl)
    listed = ", ".join(
        f"{entry.label} (KL {found.kl:.3g} nats, top-1 {found.top1:.1%})" for entry, found in known
    )
    return [f"Nearest to the reference first: {listed}."]
