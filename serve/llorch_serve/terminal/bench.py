"""``llorch bench``: speed, memory and fidelity of models on providers, or the speed of a running worker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llorch_serve.terminal.access import WorkerFlags, refuse_local_flags
from llorch_serve.terminal.bench_flags import (
    TESTS,
    Depth,
    EntryFlags,
    LengthFlags,
    ReportFlags,
    Streams,
    read_counts,
)
from llorch_serve.terminal.groups import composed, given, only
from llorch_serve.terminal.load_flags import LoadFlags
from llorch_serve.terminal.session_flags import HugePages, ProviderFlags, SessionFlags, ShareWeights
from llorch_serve.terminal.target import ModelFlags


@composed
def command(
    model: Annotated[ModelFlags, only("model_dir", "model")],
    entries: EntryFlags,
    worker: WorkerFlags,
    tests: Annotated[
        str | None,
        typer.Option(
            metavar=TESTS,
            help="What is measured: prompts alone, answers alone, both in one. Default: all.",
            show_default=False,
        ),
    ] = None,
    *,
    lengths: LengthFlags,
    depth: Depth = None,
    streams: Streams = None,
    load: LoadFlags,
    repeat: Annotated[
        int, typer.Option(min=1, help="Counted runs after one warm-up; medians are shown.")
    ] = 3,
    session: Annotated[
        SessionFlags,
        only("max_context", "kv_dtype", "single_graph", "batch_invariant", "stage_device", "stage_processes"),
    ],
    huge_pages: HugePages = None,
    share_weights: ShareWeights = False,
    threads: Annotated[ProviderFlags, only("threads")],
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also measure fidelity, against a file made by llorch verify --write-reference.",
            show_default=False,
        ),
    ] = None,
    report: ReportFlags,
) -> None:
    """Measure prefill and decode speed, greedy, with stop tokens ignored; several providers in rounds.

    Prefill: all prompt tokens over the time until every stream has its first token. Decode: all later tokens
    over the time from there. Speed says nothing about fidelity: --reference puts its figure beside it.
    docs/bench.md says more.

    For example:

        llorch bench artifacts/smollm2

        llorch bench artifacts/smollm2 --reference smollm2.reference --depth 0,2048

        llorch bench --provider cpu=artifacts/cpu --provider openvino@ov/bin/python=artifacts/ov --allow-cpu-nodes --html r.html

        llorch bench --connect 127.0.0.1:50051 --streams 1,8,32 --json

        llorch bench --connect 127.0.0.1:50051 --request-rate 2,4 --slo ttft:500 --slo tpot:50

        llorch bench compare before.json after.json --fail-under 0.95

    """  # noqa: E501 - an example is one line
    from llorch_serve.terminal.bench_output import show_report

    counts = read_counts("--streams", "1,8" if streams is None else streams, least=1)
    prompt = lengths.read()
    report.check()
    load.check(worker.connect, streams)
    if worker.connect is None:
        from llorch_serve.terminal.bench_offline import OfflineRun, measure_here

        worker.refuse()
        run = OfflineRun(
            model=model,
            entries=entries,
            tests=TESTS if tests is None else tests,
            prompt=prompt,
            lengths=lengths,
            depths=[0] if depth is None else read_counts("--depth", depth, least=0),
            streams=counts,
            repeat=repeat,
            session=session.config(
                threads, slots=max(counts), huge_pages=huge_pages, share_weights=share_weights
            ),
            reference=reference,
        )
        show_report(measure_here(run), report)
        return
    local = [*model.given(), *entries.given(), *session.given(), *threads.given()]
    local += given(tests=tests, depth=depth, huge_pages=huge_pages, reference=reference)
    local += given(share_weights=share_weights)
    refuse_local_flags(worker.connect, local)
    if load.given():
        from llorch_serve.terminal.bench_serving import measure_worker

        found = measure_worker(worker.connect, worker.access(), worker.wait, load, lengths, repeat)
    else:
        from llorch_serve.terminal.bench_streams import measure_streams

        found = measure_streams(worker.connect, worker.access(), worker.wait, lengths, counts, repeat)
    show_report(found, report)
