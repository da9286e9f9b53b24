"""Where a benchmark's report goes: stdout as a table or JSON, files as CSV, Markdown and HTML, failures to
stderr.
"""

from __future__ import annotations

from collections.abc import Iterator

from llorch_serve.bench.schema import Problem, Report
from llorch_serve.errors import ResourceError
from llorch_serve.files.durable import write_whole
from llorch_serve.terminal.bench_flags import ReportFlags
from llorch_serve.terminal.console import fail, write, write_json


def show_report(report: Report, asked: ReportFlags) -> None:
    """Write everything; exit with the code of the first failure, if there was any. With nothing measured,
    only say why.
    """
    if any(entry.rows for entry in report.entries):
        _write(report, asked)
    problems = list(_problems(report))
    for message, problem in problems:
        fail(message, problem.exit_code)
    if problems:
        raise SystemExit(problems[0][1].exit_code)


def _write(report: Report, asked: ReportFlags) -> None:
    from llorch_serve.bench import page, tables

    for path, render in (
        (asked.csv, tables.comma_separated),
        (asked.markdown, tables.markdown),
        (asked.html, page.html),
    ):
        if path is not None:
            try:
                write_whole(path, render(report).encode())
            except OSError as error:
                raise ResourceError(
                    f"{path} cannot be written ({error.strerror}); name another file"
                ) from error
    if asked.as_json:
        write_json(report)
    else:
        write(tables.terminal(report))


def _problems(report: Report) -> Iterator[tuple[str, Problem]]:
    """Yield what failed, each reason of an entry once, with its name where there are several."""
    for entry in report.entries:
        label = "" if len(report.entries) == 1 else f"{entry.label}: "
        found = [entry.problem, *(row.problem for row in entry.rows)]
        for problem in dict.fromkeys(problem for problem in found if problem is not None):
            yield f"{label}{problem.message}", problem
