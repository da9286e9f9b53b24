"""The offline half of ``llorch bench``: entries that are measured here, each in a process of its own."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from llorch_serve.artifact.folder import is_artifact, load_artifact
from llorch_serve.bench.entries import PlannedEntry, find_entries
from llorch_serve.bench.offline import WORKS, Work, longest, plan_tests
from llorch_serve.bench.process import EntryProcess
from llorch_serve.bench.protocol import Settings
from llorch_serve.bench.resources import look_at_host
from llorch_serve.bench.rounds import Plan, compare
from llorch_serve.bench.schema import Entry, OfflineTest, Report
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.fidelity.reference_file import check_reference, read_reference
from llorch_serve.foreign.detect import foreign_kind
from llorch_serve.providers.table import find_provider
from llorch_serve.terminal.bench_flags import EntryFlags, LengthFlags
from llorch_serve.terminal.console import say, step_progress
from llorch_serve.terminal.target import ModelFlags, find_artifact, find_tokenizer, resolve_artifact


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRun:
    """What is measured in this process's children.

    prompt: its token ids, which the sample text stands for otherwise. depths: tokens in each stream's context
    before. session: of each entry, but for its provider. reference: a file to compare with, or None.
    """

    model: ModelFlags
    entries: EntryFlags
    tests: str
    prompt: tuple[int, ...] | None
    lengths: LengthFlags
    depths: Sequence[int]
    streams: Sequence[int]
    repeat: int
    session: SessionConfig
    reference: Path | None


def measure_here(run: OfflineRun) -> Report:
    """Measure every entry. Raises what makes the whole command impossible; what one entry lacks is in its
    ``problem``.
    """
    tests = plan_tests(
        _read_tests(run.tests),
        prompt_tokens=run.lengths.tokens if run.prompt is None else len(run.prompt),
        generated_tokens=run.lengths.max_tokens,
        depths=run.depths,
        streams=run.streams,
    )
    entries = run.entries
    wanted = find_entries(
        entries.provider or (),
        _folder(run),
        entries.provider_option or (),
        entries.ep_library,
        cpu_nodes=entries.allow_cpu_nodes,
    )
    for one in wanted:
        _check_folder(one, run.reference)
    tokenizer = find_tokenizer()
    plan = Plan(
        tests=tests,
        longest=longest(tests),
        repeat=run.repeat,
        prompt_ids=run.prompt,
        tokenizer=None if tokenizer is None else str(tokenizer),
        reference=None if run.reference is None else str(run.reference.resolve()),
        settings=lambda one: Settings.of(replace(run.session, provider=one.choice)),
    )
    return Report(
        version=importlib.metadata.version("llorch"),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        host=look_at_host(),
        repeat=run.repeat,
        entries=_compare(wanted, plan, tests),
    )


def _compare(wanted: Sequence[PlannedEntry], plan: Plan, tests: Sequence[OfflineTest]) -> tuple[Entry, ...]:
    alone = len(wanted) == 1

    def start(one: PlannedEntry) -> EntryProcess:
        return EntryProcess(one.python, lambda line: say(line if alone else f"{one.label}: {line}"))

    with step_progress("measuring", len(wanted) * len(tests) * (plan.repeat + 1)) as advance:
        return compare(wanted, plan, start, advance)


def _read_tests(value: str) -> list[Work]:
    named = value.split(",")
    found = [work for work in WORKS if work in named]
    if odd := [name for name in named if name not in WORKS]:
        raise UsageError(f"--tests has {odd[0]!r}; expected some of {','.join(WORKS)}")
    return found


def _folder(run: OfflineRun) -> Path | None:
    """Return the folder of entries that name none; None if all name theirs and none is given."""
    providers = run.entries.provider or ()
    if providers and all("=" in spec for spec in providers):
        if named := run.model.model_dir or run.model.model:
            raise UsageError(f"DIR is {named} and every --provider names a folder of its own; leave DIR out")
        return None
    return resolve_artifact(run.model.target())


def _check_folder(one: PlannedEntry, reference: Path | None) -> None:
    """Raise what would end an entry for its folder's sake, before minutes are spent on the others."""
    if find_artifact(str(one.folder)) is None:
        target = "cpu" if one.choice.name is None else find_provider(one.choice.name).targets[0]
        raise ArtifactError(
            f"{one.folder} is a source, not an artifact; export it for {one.label} first: "
            f"llorch export {one.folder} --output DIR --target {target}"
        )
    if reference is None:
        return
    kind = None if is_artifact(one.folder) else foreign_kind(one.folder)
    if kind is not None:
        raise UsageError(
            f"--reference is for llorch's own artifacts and {one.folder} was made by {kind.value}; leave it "
            f"out"
        )
    check_reference(read_reference(reference), load_artifact(one.folder))
