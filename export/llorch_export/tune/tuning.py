"""A search from end to end: where it keeps what it finds, what it compares with, and what it leaves.

Takes a :class:`Wish`; gives a report, a recipe file with its evidence and, where it is asked for, the best
recipe's artifact.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from llorch_export.artifact.description import GRAPH_REVISION
from llorch_export.artifact.place import check_output
from llorch_export.checkpoint.base import Checkpoint
from llorch_export.options import ExportOptions
from llorch_export.pipeline import ExportResult, export
from llorch_export.recipes.file import RecipeFile
from llorch_export.recipes.written import recipe_text
from llorch_export.source.open import fingerprint, open_checkpoint
from llorch_export.tune.candidates import Candidate, Candidates
from llorch_export.tune.journal import Journal, JournaledMeasurer, journal_name
from llorch_export.tune.measurer import MachineMeasurer
from llorch_export.tune.reference import make_reference, require_memory
from llorch_export.tune.report import TuneReport, evidence, tried
from llorch_export.tune.scenarios import Prefer, Scenarios, scenarios
from llorch_export.tune.search import Limits, Search
from llorch_export.tune.standing import Bounds, Standing
from llorch_serve.artifact.lock import BeingWrittenError, exclusive
from llorch_serve.bench.resources import look_at_host, software
from llorch_serve.bench.schema import Host
from llorch_serve.config import DEFAULT_PREFILL_CHUNK
from llorch_serve.errors import ArtifactError, ResourceError, UsageError
from llorch_serve.fidelity.reference_file import (
    ReferenceFile,
    ReferenceHeader,
    check_reference,
    read_reference,
)
from llorch_serve.files.cache import cache_folder
from llorch_serve.files.durable import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for. seconds: for the search. output: the artifact's folder; None: none is exported.

    force: what is at the output may be replaced. command: as it was typed, for the evidence.
    reference: a file that ``llorch verify --write-reference`` made; None: a reference is made here.
    """

    source: str
    bounds: Bounds
    streams: tuple[int, ...]
    prompt_tokens: int | None
    seconds: float
    prefer: Prefer
    output: Path | None
    force: bool
    command: str
    reference: Path | None = None

    @property
    def recipe_path(self) -> Path | None:
        """The recipe's file beside the output; None where there is no output."""
        return None if self.output is None else self.output.with_name(f"{self.output.name}.toml")


class Tuning:
    """A search under way, in a folder that nobody else has; see :func:`opened`."""

    def __init__(
        self,
        wish: Wish,
        checkpoint: Checkpoint,
        folder: Path,
        work: Scenarios,
        host: Host,
        say: Callable[[str], None],
    ) -> None:
        self._wish = wish
        self._checkpoint = checkpoint
        self._folder = folder
        self._host = host
        self._say = say
        self._started = time.monotonic()
        self._pool = Candidates(checkpoint, host.cpu_features, work.prompt_tokens)
        base = ExportOptions(source=wish.source, output=Path(), embed="none")
        path = wish.reference or folder / "reference"
        machine = MachineMeasurer(base, folder / "artifacts", path, work, self._say)
        self._reference = self._find_reference(path, machine)
        journal = Journal(folder / "journal.jsonl")
        if journal.taken_up:
            say(f"taking up {journal.taken_up} measurements of {folder}; remove it to measure anew")
        self._search = Search(
            self._pool,
            JournaledMeasurer(machine, journal),
            Limits(wish.bounds, work.weights(wish.prefer), wish.seconds),
            time.monotonic,
            lambda standing, _found: self._tell(standing),
        )

    def run(self) -> None:
        """Search until nothing is left to try or the time is up. Raises ResourceError if the default recipe
        cannot be measured.
        """
        self._search.run()

    def report(self, *, complete: bool) -> TuneReport | None:
        """Return what is known; None while that is nothing. complete: it was not interrupted."""
        found, wish = self._search.found, self._wish
        if found is None:
            return None
        best = found.best()
        return TuneReport(
            source=wish.source,
            complete=complete,
            chosen=None if best is None or not best.speeds else best.candidate.label,
            default=self._pool.default.label,
            recipe=None,
            artifact=None,
            command=wish.command,
            export=None,
            serve=None,
            oracle=self._reference.header.oracle,
            positions=len(self._reference.header.token_ids),
            host=self._host,
            software=software(),
            max_kl=wish.bounds.max_kl,
            memory_mib=wish.bounds.memory_mib,
            prefer=wish.prefer,
            seconds=time.monotonic() - self._started,
            round_noise=found.round_noise(),
            tried=tried(found),
        )

    def keep(self, report: TuneReport) -> tuple[Path, str, str]:
        """Write the chosen recipe with its evidence; return the file, the command that exports by it, and the
        one that serves what was exported as it was measured.
        """
        found = self._search.found
        assert found is not None
        best = found.best()
        assert best is not None, "a report that names a choice"
        path = self._wish.recipe_path or self._folder / "best.toml"
        output = self._wish.output or Path("DIR")
        command = shlex.join(
            ["llorch", "export", self._wish.source, "--recipe", str(path), "--output", str(output)]
        )
        created = datetime.now(UTC).isoformat(timespec="seconds")
        serve = serve_command(best, output)
        told = {**evidence(report, created), "export": command, "serve": serve}
        text = recipe_text(kept_recipe(best, self._wish.bounds, self._host), told)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.encode())
        except OSError as error:
            raise ResourceError(
                f"{path} cannot be written ({error.strerror}); choose another --output"
            ) from error
        return path, command, serve

    def export(self) -> ExportResult | None:
        """Export the chosen recipe to the output, as its file does; None where there is no output."""
        found, output = self._search.found, self._wish.output
        assert found is not None
        best = found.best()
        if output is None or best is None:
            return None
        recipe = kept_recipe(best, self._wish.bounds, self._host)
        options = ExportOptions(source=self._wish.source, output=output, force=self._wish.force)
        return export(recipe.options(options), lambda phase, done, total: None)

    def clean(self) -> None:
        """Remove the artifacts of candidates, which can be exported again; what was measured is kept."""
        shutil.rmtree(self._folder / "artifacts", ignore_errors=True)

    def _find_reference(self, path: Path, machine: MachineMeasurer) -> ReferenceFile:
        """Return the reference at ``path``, which is made where it is not given and not there."""
        if self._wish.reference is not None:
            given = read_reference(path)
            check_reference(given, machine.artifact(self._pool.default))
            return given
        with contextlib.suppress(ArtifactError):
            return read_reference(path)
        require_memory(self._checkpoint)
        artifact = machine.artifact(self._pool.default)
        self._say("running the model in fp32, which the recipes are compared with")
        why = make_reference(path, artifact, self._checkpoint)
        if why is not None:
            self._say(
                f"note: the reference is llorch's own graph in fp32, for {why}; it does not show a fault "
                "that all of llorch's graphs share"
            )
        return read_reference(path)

    def _tell(self, standing: Standing) -> None:
        found = self._search.found
        assert found is not None
        words = [f"KL {standing.kl:.3g}"] if standing.judgement.fidelity is not None else []
        if standing.ratios:
            score = found.score(standing)
            words.append(f"{score.ratio:.3f} of the default's speed over {len(standing.ratios)} rounds")
        if standing.lost is not None:
            words.append(f"left out: {standing.lost}")
        spent = time.monotonic() - self._started
        self._say(f"{spent:.0f} s: {standing.candidate.label}: {', '.join(words)}")


@contextlib.contextmanager
def opened(wish: Wish, say: Callable[[str], None]) -> Iterator[Tuning]:
    """Open a source for a search, and make its reference. Refuses what cannot be before anything is measured.

    Raises UsageError, ArtifactError or ResourceError.
    """
    if wish.output is not None:
        check_output(wish.output, force=wish.force)
        _check_recipe(wish)
    checkpoint = open_checkpoint(wish.source, None)
    if checkpoint.embedding is not None:
        raise UsageError(
            f"{wish.source} embeds texts, and recipes are compared by the next token's probabilities; "
            "docs/embeddings.md says what int8 costs there. llorch export --recipe int8 exports it"
        )
    work = scenarios(wish.streams, wish.prompt_tokens, checkpoint.config.max_exact_context)
    host = look_at_host()
    given = None if wish.reference is None else read_reference(wish.reference).header
    folder = cache_folder() / "tune" / _name(checkpoint, work, host, given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(
            f"{folder} cannot be made ({error.strerror}); name a folder with room in LLORCH_CACHE"
        ) from error
    try:
        with exclusive(folder):
            yield Tuning(wish, checkpoint, folder, work, host, say)
    except BeingWrittenError as error:
        raise UsageError(
            f"another llorch tune of this model is running, in {folder}; wait until it has ended"
        ) from error


def _name(checkpoint: Checkpoint, work: Scenarios, host: Host, given: ReferenceHeader | None) -> str:
    """Return the name of a search's folder: figures hold for one model, machine, work and set of versions,
    and for one reference where one is given.
    """
    machine = (host.cpu, host.cpu_features, host.cpus_allowed)
    facts = (fingerprint(checkpoint), machine, software(), GRAPH_REVISION, work.tests, given)
    return journal_name(facts)


def _check_recipe(wish: Wish) -> None:
    path = wish.recipe_path
    if path is None or not path.exists():
        return
    if not path.is_file():
        raise UsageError(f"{path} is no file, and the recipe would go there; choose another --output")
    if not wish.force:
        raise UsageError(f"{path} is there already, and the recipe would go there; replace it with --force")


def serve_command(best: Standing, output: Path) -> str:
    """Return the command that serves an artifact as the recipe was measured."""
    chunk = best.candidate.prefill_chunk
    flags = [] if chunk == DEFAULT_PREFILL_CHUNK else ["--prefill-chunk", str(chunk)]
    return shlex.join(["llorch", "serve", str(output), *flags])


def kept_recipe(best: Standing, bounds: Bounds, host: Host) -> RecipeFile:
    """Return the recipe to keep. Beyond its own limit, that is the bound that it was found within."""
    candidate: Candidate = best.candidate
    recipe = candidate.recipe
    fidelity = best.judgement.fidelity
    if fidelity is not None and not fidelity.passed:
        recipe = replace(recipe, defaults=replace(recipe.defaults, kl_limit=bounds.max_kl))
    version = importlib.metadata.version("llorch")
    return replace(recipe, description=f"{candidate.label}, found by llorch tune {version} on {host.cpu}")
