"""``llorch eval``: quality figures of a model, in this process or behind a worker, for people and for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from llorch_serve.terminal.access import WorkerFlags, refuse_local_flags
from llorch_serve.terminal.evaluation_flags import GateFlags, TaskFlags, TextFlags
from llorch_serve.terminal.groups import composed, given, only
from llorch_serve.terminal.session_flags import ProviderFlags, SessionFlags
from llorch_serve.terminal.target import ModelFlags

DEFAULT_SLOTS: Final = 8


@composed
def command(
    model: ModelFlags,
    worker: WorkerFlags,
    *,
    texts: TextFlags,
    tasks: TaskFlags,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also measure divergence, against a file made by llorch verify --write-reference.",
            show_default=False,
        ),
    ] = None,
    gates: GateFlags,
    session: Annotated[SessionFlags, only("max_context", "kv_dtype", "single_graph", "batch_invariant")],
    slots: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Sequences that are answered at once. Default: {DEFAULT_SLOTS}.", show_default=False
        ),
    ] = None,
    provider: ProviderFlags,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of tables.")
    ] = False,
) -> None:
    """Measure how good a model is: perplexity of texts, tasks of lm-eval, divergence from its checkpoint.

    Exit codes: 0 measured, and every limit kept; 1 a limit was missed, or with --fail-if-worse a figure is
    worse than the baseline's beyond noise; others as everywhere. docs/evaluation.md says what figures mean.

    For example:

        llorch eval artifacts/smollm2

        llorch eval artifacts/smollm2 --text wikitext.txt --window 2048 --stride 512 --at-most perplexity=25

        llorch eval artifacts/smollm2 --tasks arc_easy,hellaswag --limit 200 --at-least arc_easy.acc=0.5 --json

        llorch eval --connect 127.0.0.1:50051 --tasks capitals --task-folder tasks --baseline before.json --fail-if-worse

    """  # noqa: E501 - an example is one line
    local = [*session.given(), *provider.given(), *given(slots=slots, reference=reference)]
    if worker.connect is not None:
        refuse_local_flags(worker.connect, [*model.given(), *local])
    else:
        worker.refuse()
        model.target()  # refuses no model at all, before minutes are spent on tasks
    from llorch_serve.terminal.evaluation_model import open_asked
    from llorch_serve.terminal.evaluation_run import judge, plan

    config = session.config(provider, slots=DEFAULT_SLOTS if slots is None else slots)
    asked = plan(texts, tasks, gates, reference)
    with open_asked(model, worker, config, asked.reference) as opened:
        found = asked.evaluate(opened)
    judge(found, asked, as_json=as_json)
