"""What ``llorch tune`` chooses, against every named recipe measured in full afterwards.

    ci/measurement tuned SOURCE FOLDER [TIME] [ROUNDS] [STREAMS]     # 2m, 3 and 1,8

SOURCE is as for ``llorch export``. FOLDER keeps the reference, the search's journal and all exports: the same
command goes on where it was interrupted. First ``llorch tune`` runs as a user would run it, for TIME. Then
its choice and every recipe that is shipped run by turns, ROUNDS times and once to warm up, whatever the
search thought of them; the default recipe and the choice run in every race, as many at a time as memory has
room for. Prints a table of divergence, speeds and the weighted geometric mean of speeds over the default's in
the same round (the search's objective: its median, least and largest), and whether a named recipe within the
bound was faster than the choice by more than what rounds differ by.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from llorch_export.options import ExportOptions
from llorch_export.recipes.file import load_recipe
from llorch_export.source.open import open_checkpoint
from llorch_export.tune.candidates import Candidate, Candidates
from llorch_export.tune.measurer import MachineMeasurer
from llorch_export.tune.reference import make_reference
from llorch_export.tune.report import TuneReport
from llorch_export.tune.scenarios import Scenarios, scenarios
from llorch_export.tune.search import ENTRANTS
from llorch_export.tune.standing import Lap, Scenario, ratio
from llorch_serve.bench.resources import look_at_host
from llorch_serve.python_child import module_command

CHOICE = "the choice"


def say(line: str) -> None:
    """Tell people a line."""
    print(line, flush=True)  # noqa: T201


@dataclass
class Measured:
    """A recipe in full. ratios: logarithms, of each round to the default's in the same round."""

    candidate: Candidate
    kl: float
    speeds: list[dict[Scenario, float]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    def add(self, lap: Lap, base: Lap, weights: dict[Scenario, float]) -> None:
        """Take in a race's rounds. Raises SystemExit where one of the two did not run."""
        problem = lap.problem or base.problem
        if problem is not None:
            raise SystemExit(f"{self.candidate.label} cannot be measured: {problem}")
        self.speeds += lap.rounds
        self.ratios += [
            ratio(own, other, weights) for own, other in zip(lap.rounds, base.rounds, strict=True)
        ]

    @property
    def score(self) -> float:
        """The median ratio to the default's speed."""
        return math.exp(statistics.median(self.ratios))

    def row(self, scenario_names: Sequence[Scenario]) -> str:
        """Return the recipe's line of the table."""
        speeds = [f"{statistics.median(one[name] for one in self.speeds):.1f}" for name in scenario_names]
        low, high = math.exp(min(self.ratios)), math.exp(max(self.ratios))
        cells = [
            self.candidate.label,
            f"{self.kl:.3g}",
            *speeds,
            f"{self.score:.3f} ({low:.3f} to {high:.3f})",
        ]
        return f"| {' | '.join(cells)} |"


def tuned(source: str, folder: Path, seconds: str, streams: str, reference: Path) -> TuneReport:
    """Run the command, whose cache is in ``folder``; return its report."""
    flags = ["--time", seconds, "--streams", streams, "--reference", str(reference), "--json", "--force"]
    command = [*module_command(sys.executable, "llorch_serve"), "tune", source, *flags]
    found = subprocess.run(
        [*command, "--output", str(folder / "chosen")],
        env={**os.environ, "LLORCH_CACHE": str(folder / "cache")},
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.json.decode(found.stdout, type=TuneReport)


def measure(
    measurer: MachineMeasurer, work: Scenarios, default: Candidate, others: Sequence[Candidate], rounds: int
) -> list[Measured]:
    """Return all in full but what memory has no room for, the default first and the choice second.

    Raises SystemExit where one of these two cannot be measured.
    """
    sizes, found = {}, []
    for one in (default, *others):
        judgement = measurer.judge(one)
        if judgement.fidelity is None:
            if one in (default, others[0]):
                raise SystemExit(f"{one.label} cannot be measured: {judgement.problem}")
            say(f"{one.label} is left out: {judgement.problem}")
            continue
        sizes[one.key] = judgement.folder_bytes or 0
        found.append(Measured(one, judgement.fidelity.kl))
    weights = work.weights("balance")
    for race in races(found, lambda group: measurer.fit([sizes[one.candidate.key] for one in group])):
        laps = measurer.race([one.candidate for one in race], rounds)
        for one, lap in zip(race, laps, strict=True):
            one.add(lap, laps[0], weights)
    return [one for one in found if one.ratios]


def races(
    found: Sequence[Measured], has_room: Callable[[Sequence[Measured]], bool]
) -> Iterator[Sequence[Measured]]:
    """Give who runs beside whom: the first two of all, and as many others as memory has room for.

    What has room beside the default alone runs beside it alone, and what has none is left out, which is said.
    """
    always, rest = found[:2], list(found[2:])
    large = [one for one in rest if not has_room([*always, one])]
    rest = [one for one in rest if one not in large]
    while True:
        race = list(always)
        while rest and len(race) < len(always) + ENTRANTS and has_room([*race, rest[0]]):
            race.append(rest.pop(0))
        yield race
        if not rest:
            break
    for one in large:
        if has_room([found[0], one]):
            yield [found[0], one]
        else:
            say(f"{one.candidate.label} is left out: memory has no room for it beside the default")


def verdict(found: Sequence[Measured], report: TuneReport) -> str:
    """Return whether the search missed a named recipe."""
    choice = next(one for one in found if one.candidate.label == CHOICE)
    within = [one for one in found if one.kl <= report.max_kl and one is not choice]
    best = max(within, key=lambda one: one.score, default=choice)
    spread = max(math.exp(max(one.ratios) - min(one.ratios)) for one in (best, choice))
    beside = (
        f"{best.candidate.label} at {best.score:.3f}, the choice at {choice.score:.3f}, "
        f"within KL {report.max_kl:g}"
    )
    if best.score > choice.score * spread:
        return f"MISSED: {beside}"
    return f"no named recipe is faster than the choice by more than rounds differ by ({spread:.3f}): {beside}"


def main(source: str, place: str, seconds: str = "2m", rounds: str = "3", streams: str = "1,8") -> None:
    """See the module's words. Exits with 1 where a named recipe is faster than the choice."""
    began = time.monotonic()
    folder = Path(place).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(source, None)
    work = scenarios([int(count) for count in streams.split(",")], None, checkpoint.config.max_exact_context)
    pool = Candidates(checkpoint, look_at_host().cpu_features, work.prompt_tokens)
    reference = folder / "reference"
    base = ExportOptions(source=source, output=Path(), embed="none")
    measurer = MachineMeasurer(base, folder / "named", reference, work, say)
    if not reference.is_file():
        make_reference(reference, measurer.artifact(pool.default), checkpoint)
    report = tuned(source, folder, seconds, streams, reference)
    if report.chosen is None or report.recipe is None:
        raise SystemExit(f"nothing keeps KL {report.max_kl:g}; the search tried {len(report.tried)} recipes")
    chunk = next(one.prefill_chunk for one in report.tried if one.label == report.chosen)
    choice = Candidate(CHOICE, load_recipe(report.recipe), prefill_chunk=chunk)
    found = measure(measurer, work, pool.default, [choice, *pool.named()], int(rounds))
    names = list(found[0].speeds[0])
    took = f"tune {report.seconds:.0f} s of {seconds}, all {time.monotonic() - began:.0f} s"
    say(f"\n{report.host.cpu}, {report.host.cpus_allowed} CPUs; {took}; {len(report.tried)} recipes tried")
    say(f"the choice is: {report.chosen} (served by: {report.serve})\n")
    say(f"| recipe | KL, nats | {' | '.join(f'{name}, tokens/s' for name in names)} | to the default |")
    say("|---" * (len(names) + 3) + "|")
    for one in sorted(found, key=lambda one: -one.score):
        say(one.row(names))
    said = verdict(found, report)
    say(f"\n{said}")
    raise SystemExit(said.startswith("MISSED"))


if __name__ == "__main__":
    main(*sys.argv[1:])
