"""``llorch batch``: a file of requests in, a file of answers out, each line once however often it is
interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import typer

from llorch_serve.batch.lines import LineForm
from llorch_serve.batch.opening import open_source
from llorch_serve.batch.place import hold_output
from llorch_serve.batch.plan import make_plan
from llorch_serve.batch.tables import is_parquet, write_parquet
from llorch_serve.errors import LlorchError, UsageError
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.terminal.access import WorkerFlags, refuse_local_flags
from llorch_serve.terminal.batch_flags import SLOTS, RunFlags, bare_settings
from llorch_serve.terminal.batch_output import show_counts, show_summary
from llorch_serve.terminal.console import note, say
from llorch_serve.terminal.groups import composed, given, only
from llorch_serve.terminal.requirements import required
from llorch_serve.terminal.sampling_flags import SamplingFlags
from llorch_serve.terminal.serving_flags import NameFlags
from llorch_serve.terminal.session_flags import EngineFlags, HugePages, ProviderFlags, SessionFlags
from llorch_serve.terminal.target import ModelFlags

_MAX_TOKENS: Final = 256
_MOST_SHOWN: Final = 20  # bad lines that --check names


@composed
def command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="Requests, in OpenAI's form for batches, or bare prompts and chats: JSON Lines, or a table "
            "where the name ends with .parquet.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="Answers: JSON Lines. Failures go to OUT.errors.jsonl; OUT.run.json says what both were "
            "made from. OUT.parquet is made of OUT.parquet.jsonl when all is done.",
        ),
    ],
    model: ModelFlags,
    worker: WorkerFlags,
    run: RunFlags,
    max_tokens: Annotated[int, typer.Option(help="Of bare lines: most tokens to generate.")] = _MAX_TOKENS,
    *,
    sampling: Annotated[
        SamplingFlags,
        only(
            "min_tokens",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "typical_p",
            "presence_penalty",
            "frequency_penalty",
            "repeat_last_n",
            "logit_bias",
            "seed",
            "stop",
            "stop_token_id",
            "ignore_eos",
        ),
    ],
    unknown_fields: Annotated[
        UnknownFields,
        typer.Option(
            "--unknown-fields",
            help="Whether fields of bodies that llorch does not know fail their line, or are left aside and "
            "told in the answer's llorch.ignored.",
        ),
    ] = UnknownFields.REFUSE,
    name: NameFlags,
    session: Annotated[
        SessionFlags, only("max_context", "kv_cache_memory", "kv_dtype", "single_graph", "batch_invariant")
    ],
    huge_pages: HugePages = None,
    engine: Annotated[
        EngineFlags,
        only(
            "no_prefix_cache",
            "strict_reuse",
            "lookup",
            "draft",
            "tool_format",
            "reasoning_format",
            "rank_format",
        ),
    ],
    provider: ProviderFlags,
) -> None:
    """Answer every line of a file once, with a model or a running worker, and go on where an earlier run
    ended.

    Lines are OpenAI's ({"custom_id", "method", "url", "body"}, for chats, completions, responses, embeddings,
    scores and ranks), or have a "prompt" or "messages", which the flags for sampling are for. Run the same
    command again after it was interrupted, in whatever way. docs/batch.md says more.

    For example:

        llorch batch requests.jsonl answers.jsonl artifacts/smollm2

        llorch batch requests.jsonl answers.jsonl --connect 127.0.0.1:50051 --order prefix

        llorch batch prompts.jsonl answers.jsonl artifacts/smollm2 --temperature 0 --max-tokens 64 --ordered

        llorch batch requests.jsonl answers.jsonl artifacts/smollm2 --check

    """
    with required("http"):
        import llorch_serve.http.inner  # noqa: F401 - fails here, before anything is read
    form = LineForm(bare_settings(sampling, max_tokens))
    if run.check:
        _check(source, form, run)
        return
    with required("http"):
        from llorch_serve.terminal.batch_job import BatchJob
    job = BatchJob(source, form, run, unknown_fields)
    if worker.connect is not None:
        local = [*name.given(), *session.given(), *engine.given(), *provider.given()]
        refuse_local_flags(worker.connect, [*model.given(), *local, *given(huge_pages=huge_pages)])
        worker.access()  # a file that cannot be used is told before the input is read
    else:
        worker.refuse()
        model.target()  # likewise
    slots = run.concurrency or SLOTS
    config = name.add_to(engine.config(session.config(provider, slots=slots, huge_pages=huge_pages)))
    as_table = is_parquet(output)
    if as_table:
        with required("parquet"):
            import pyarrow.parquet  # noqa: F401 - fails here, before minutes are spent on answers
    with _named(), hold_output(output.with_name(f"{output.name}.jsonl") if as_table else output) as place:
        with job.planned(place) as plan:
            if not plan.counts.bare and (unused := sampling.given()):
                note(f"{unused[0]} has no effect, as no line is a bare prompt or chat")
            if worker.connect is not None:
                done = asyncio.run(job.run_elsewhere(place, plan, worker))
            else:
                done = job.run_here(place, plan, model, config)
        if as_table:
            write_parquet(place.output, place.errors, output)
        show_summary(done, output, place.errors, as_json=run.as_json)
    if done.failed:
        raise LlorchError(
            f"{done.failed} of {done.lines} lines failed; why is in {place.errors}. Run the same command "
            "with --retry-failed to answer them again"
        )


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Raise UsageError for a file or folder that the system refuses."""
    try:
        yield
    except OSError as error:
        place = error.filename or "a file"
        raise UsageError(
            f"{place} cannot be used ({error.strerror or error}); choose another, or mend that"
        ) from error


def _check(source: Path, form: LineForm, run: RunFlags) -> None:
    """Say what is in an input. Raises UsageError where it cannot be run, LlorchError for lines that will
    fail.
    """
    with (
        _named(),
        tempfile.TemporaryDirectory(prefix="llorch-batch-") as folder,
        open_source(source, Path(folder)) as lines,
        make_plan(lines, form, Path(folder)) as plan,
    ):
        show_counts(plan.counts, as_json=run.as_json)
        bad = (one for one in plan.pending(in_blocks=False) if one.problem is not None)
        if not plan.counts.bad:
            return
        for one in islice(bad, _MOST_SHOWN):
            say(f"line {one.number} {one.problem}")
        raise LlorchError(
            f"{plan.counts.bad} of {plan.counts.lines} lines cannot be answered; a run answers the others "
            "and tells of these beside its output"
        )
