"""What ``llorch batch`` shows: a bar while it runs, and at its end what was done, and where failures are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from llorch_serve.batch.plan import Counts
from llorch_serve.batch.summary import Summary
from llorch_serve.terminal.console import say, write_json

_MINUTE_S: Final = 60
_HOUR_S: Final = 3600


@contextlib.contextmanager
def batch_progress() -> Iterator[Callable[[Summary], None]]:
    """Show how far a batch is on stderr; nothing where stderr is not a terminal.

    Yields a function that takes summaries.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)

        def tell(summary: Summary) -> None:
            done = summary.answered + summary.failed
            progress.update(task, total=summary.lines, completed=done, description=describe_rate(summary))

        yield tell


def describe_rate(summary: Summary, *, left: bool = True) -> str:
    """Return how fast a batch is, how much of it failed, and how long what is left takes."""
    told = []
    if summary.failed:
        told.append(f"{summary.failed} failed")
    if summary.lines_per_s is not None:
        told.append(f"{_number(summary.lines_per_s)} lines/s")
        tokens = (summary.prompt_tokens + summary.completion_tokens) / summary.seconds
        told.append(f"{_number(tokens)} tokens/s")
    if left and summary.seconds_left is not None:
        told.append(f"{duration(summary.seconds_left)} left")
    return ", ".join(told)


def duration(seconds: float) -> str:
    """Return a duration for people: 12.3 s, 4:05 or 1:02:03."""
    if round(seconds, 1) < _MINUTE_S:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), _HOUR_S)
    minutes, rest = divmod(rest, _MINUTE_S)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # three digits, and no less than whole ones


def show_summary(summary: Summary, output: Path, errors: Path, *, as_json: bool) -> None:
    """Say what a batch has done: in a line for people, or as JSON."""
    if as_json:
        write_json(summary_document(summary, output, errors))
        return
    done = summary.answered + summary.failed - summary.answered_before - summary.failed_before
    before = summary.answered_before + summary.failed_before
    told = f"{done} of {summary.lines} lines done in {duration(summary.seconds)}"
    if before:
        told += f", {before} before"
    if done:
        told += f" ({describe_rate(summary, left=False)})"
    cached = f", {summary.cached_tokens} of them not computed again" if summary.cached_tokens else ""
    tokens = f"{summary.prompt_tokens} tokens of prompts{cached}, {summary.completion_tokens} of answers"
    say(f"{told}; {tokens}: {output}")


def summary_document(summary: Summary, output: Path, errors: Path) -> dict[str, Any]:
    """Return a summary for programs. seconds and tokens are of this run alone."""
    return {
        "output": str(output),
        "errors": str(errors) if summary.failed else None,
        "lines": summary.lines,
        "answered": summary.answered,
        "failed": summary.failed,
        "answered_before": summary.answered_before,
        "failed_before": summary.failed_before,
        "retries": summary.retries,
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.cached_tokens,
        "completion_tokens": summary.completion_tokens,
        "seconds": summary.seconds,
        "lines_per_s": summary.lines_per_s,
    }


def show_counts(counts: Counts, *, as_json: bool) -> None:
    """Say what an input holds."""
    if as_json:
        found = {"lines": counts.lines, "bad": counts.bad, "bare": counts.bare, "tokens": counts.tokens}
        write_json(found)
        return
    bare = f", {counts.bare} of them bare prompts or chats" if counts.bare else ""
    say(f"{counts.lines} lines{bare}, about {counts.tokens} tokens with their answers")
