"""The search over recipes, with a measurer that knows every recipe's true speed and adds noise."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from llorch_export.recipes.file import RecipeDefaults, RecipeFile
from llorch_export.tune.candidates import Candidate
from llorch_export.tune.choice import Standings
from llorch_export.tune.journal import Journal, JournaledMeasurer
from llorch_export.tune.search import Limits, Search
from llorch_export.tune.standing import (
    Bounds,
    Judgement,
    Lap,
    Score,
    Standing,
    deviation,
    score,
    usual_deviation,
)
from llorch_serve.errors import ResourceError
from support.builders.bench_reports import fidelity

WEIGHTS = {"prefill": 1.0, "decode": 1.0}


def candidate(label: str, limit: float = 0.01) -> Candidate:
    """A recipe that differs from every other label's."""
    return Candidate(label, RecipeFile(label, "", RecipeDefaults(prefill=label), ()), limit)


@dataclass
class Played:
    """A measurer of recipes by label: (speed, KL, MiB). Noise is of single runs; a machine's drift is of all.

    order: what was raced. failing: labels that cannot be run. ends_after: races after which Ctrl-C comes.
    """

    truth: dict[str, tuple[float, float, float]]
    noise: float = 0.02
    seed: int = 0
    failing: frozenset[str] = frozenset()
    ends_after: int | None = None
    room: int = 9
    judged: list[str] = field(default_factory=list)
    raced: list[tuple[tuple[str, ...], int]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def judge(self, candidate: Candidate) -> Judgement:
        self.judged.append(candidate.label)
        self.now += 10
        return Judgement(fidelity=fidelity(self.truth[candidate.label][1]), folder_bytes=1)

    def race(self, entrants: Sequence[Candidate], rounds: int) -> list[Lap]:
        if self.ends_after is not None and len(self.raced) >= self.ends_after:
            raise KeyboardInterrupt
        self.raced.append((tuple(one.label for one in entrants), rounds))
        self.now += 3 * rounds * len(entrants)
        drift = [self._random.uniform(0.5, 1.5) for _ in range(rounds)]
        return [self._lap(one.label, drift) for one in entrants]

    def _lap(self, label: str, drift: list[float]) -> Lap:
        if label in self.failing:
            return Lap(problem="killed")
        speed, _, mib = self.truth[label]
        rounds = [
            {name: speed * moment * math.exp(self._random.gauss(0, self.noise)) for name in WEIGHTS}
            for moment in drift
        ]
        return Lap(rounds=tuple(rounds), peak_mib=mib)

    def fit(self, folder_bytes: Sequence[int]) -> bool:
        return len(folder_bytes) <= self.room

    def forget(self, candidate: Candidate) -> None:
        self.forgotten.append(candidate.label)


class Table:
    """Candidates: those of the first row, then those that a step from a label leads to."""

    def __init__(self, named: str, steps: dict[str, str] | None = None) -> None:
        self.default = candidate("default")
        self._named = named
        self._steps = steps or {}

    def named(self) -> list[Candidate]:
        return [candidate(label, 0.4 if label == "wrong" else 0.01) for label in self._named.split()]

    def steps(self, start: Candidate) -> list[Candidate]:
        return [candidate(label) for label in self._steps.get(start.label, "").split()]


def search(pool: Table, played: Played, bounds: Bounds | None = None, seconds: float = 1e6) -> Search:
    limits = Limits(bounds or Bounds(0.01), WEIGHTS, seconds)
    return Search(pool, played, limits, lambda: played.now, lambda one, all_: None)


def best(found: Standings) -> str | None:
    kept = found.best()
    return None if kept is None else kept.candidate.label


DEFAULT = {"default": (100.0, 0.008, 500.0)}


def test_the_fastest_within_bounds_is_chosen_whatever_the_machine_drifts_by() -> None:
    truth = DEFAULT | {
        "slow": (80.0, 0.001, 400.0),
        "good": (115.0, 0.009, 500.0),
        "better": (130.0, 0.005, 700.0),
        "wrong": (200.0, 0.3, 300.0),
    }
    played = Played(truth)
    found = search(Table("slow good better wrong"), played).run()
    assert best(found) == "better"
    assert math.exp(found.score(found.of(candidate("better"))).value) == pytest.approx(1.3, rel=0.05)
    # Beyond the bound of divergence nothing is run, and what is slower beyond noise runs but once.
    assert all("wrong" not in names for names, _ in played.raced)
    assert [rounds for names, rounds in played.raced if "slow" in names] == [2]
    assert {"wrong", "slow"} <= set(played.forgotten)


@pytest.mark.parametrize("seed", range(12))
def test_the_default_stays_where_all_are_the_same_but_for_noise(seed: int) -> None:
    labels = [f"same{n}" for n in range(12)]
    played = Played(DEFAULT | dict.fromkeys(labels, (100.0, 0.008, 500.0)), noise=0.05, seed=seed)
    assert best(search(Table(" ".join(labels)), played).run()) == "default"


def test_each_round_of_halving_has_at_most_half_of_the_contenders_and_always_the_default() -> None:
    labels = [f"same{n}" for n in range(8)]
    played = Played(DEFAULT | dict.fromkeys(labels, (104.0, 0.008, 500.0)), noise=0.05)
    search(Table(" ".join(labels)), played).run()
    assert all(names[0] == "default" for names, _ in played.raced)
    entrants = dict.fromkeys((2, 4, 8), 0)
    for names, rounds in played.raced:
        entrants[rounds] += len(names) - 1
    assert entrants[2] == 8
    assert 1 <= entrants[4] <= 4
    assert 1 <= entrants[8] <= 2


def test_memory_is_a_bound_and_the_default_may_be_beyond_it() -> None:
    truth = DEFAULT | {"big": (150.0, 0.005, 900.0), "small": (60.0, 0.009, 200.0)}
    assert best(search(Table("big small"), Played(truth), Bounds(0.01, 600.0)).run()) == "default"
    assert best(search(Table("big small"), Played(truth), Bounds(0.01, 300.0)).run()) == "small"
    found = search(Table("big small"), Played(truth), Bounds(0.01, 100.0)).run()
    assert best(found) is None
    assert found.beyond(found.default) == "500 MiB are beyond 100"


def test_a_default_beyond_the_bound_of_divergence_is_what_others_are_compared_with_and_not_kept() -> None:
    truth = DEFAULT | {"near": (70.0, 0.002, 500.0), "nearer": (50.0, 0.001, 500.0)}
    found = search(Table("near nearer"), Played(truth), Bounds(0.0027)).run()
    assert best(found) == "near"
    assert found.beyond(found.default) == "KL 0.008 is beyond 0.0027"


def test_of_recipes_that_are_equally_fast_the_nearest_is_kept() -> None:
    truth = DEFAULT | {"far": (150.5, 0.009, 500.0), "near": (150.0, 0.004, 500.0)}
    assert best(search(Table("far near"), Played(truth)).run()) == "near"


def test_steps_lead_on_from_the_best_so_far() -> None:
    truth = DEFAULT | {"a": (120.0, 0.005, 500.0), "a2": (140.0, 0.005, 500.0), "a3": (170.0, 0.005, 500.0),
                       "d2": (90.0, 0.005, 500.0)}  # fmt: skip
    played = Played(truth)
    found = search(Table("a", {"default": "d2", "a": "a2", "a2": "a3"}), played).run()
    assert best(found) == "a3"
    assert played.judged == ["default", "a", "a2", "a3", "d2"]


def test_steps_from_a_winner_come_after_all_shipped_recipes_and_before_other_steps() -> None:
    truth = DEFAULT | dict.fromkeys("bcde", (90.0, 0.005, 500.0)) | {"a": (150.0, 0.005, 500.0)}
    truth |= {"a2": (91.0, 0.005, 500.0), "d2": (90.0, 0.005, 500.0)}
    played = Played(truth)
    search(Table("a b c d e", {"default": "d2", "a": "a2"}), played).run()
    assert played.judged == ["default", *"abcde", "a2", "d2"]


def test_shipped_recipes_of_a_kind_far_beyond_the_bound_come_last() -> None:
    truth = DEFAULT | {"wrong": (200.0, 0.3, 1.0), "a": (101.0, 0.005, 500.0), "d2": (99.0, 0.005, 500.0)}
    played = Played(truth)
    search(Table("wrong a", {"default": "d2"}), played).run()
    assert played.judged == ["default", "a", "d2", "wrong"]
    played = Played(truth)
    assert best(search(Table("wrong a", {"default": "d2"}), played, Bounds(0.5)).run()) == "wrong"
    assert played.judged[1] == "wrong"


def test_what_fails_is_left_out_with_its_reason_and_the_others_go_on() -> None:
    truth = DEFAULT | {"broken": (300.0, 0.001, 1.0), "good": (130.0, 0.005, 500.0)}
    found = search(Table("broken good"), Played(truth, failing=frozenset({"broken"}))).run()
    assert best(found) == "good"
    assert found.of(candidate("broken")).problem == "killed"


def test_an_artifact_is_kept_while_it_serves_another_candidate_that_may_win(tmp_path: Path) -> None:
    slow = candidate("a")
    fast = replace(slow, label="a, prompts 512 tokens at a time", prefill_chunk=512)
    truth = DEFAULT | {slow.label: (80.0, 0.005, 500.0), fast.label: (150.0, 0.005, 500.0)}
    table, played = Table(""), Played(truth)
    table.named = lambda: [slow, fast]  # type: ignore[method-assign]
    measurer = JournaledMeasurer(played, Journal(tmp_path / "journal"))
    limits = Limits(Bounds(0.01), WEIGHTS, 1e6)
    found = Search(table, measurer, limits, lambda: played.now, lambda one, all_: None).run()
    assert best(found) == fast.label
    assert played.judged == ["default", "a"]  # one artifact is looked at once
    assert played.forgotten == []


def test_without_the_default_nothing_can_be_compared() -> None:
    with pytest.raises(ResourceError, match=r"the default recipe default cannot be measured here.*killed"):
        search(Table(""), Played(DEFAULT, failing=frozenset({"default"}))).run()


def test_a_race_has_as_many_as_memory_has_room_for() -> None:
    truth = DEFAULT | dict.fromkeys(("a", "b", "c"), (101.0, 0.005, 500.0))
    played = Played(truth, room=2)
    search(Table("a b c"), played).run()
    assert {len(names) for names, _ in played.raced} == {2}


def test_when_the_time_is_up_no_further_race_begins() -> None:
    labels = [f"c{n}" for n in range(30)]
    played = Played(DEFAULT | dict.fromkeys(labels, (101.0, 0.005, 500.0)))
    found = search(Table(" ".join(labels)), played, seconds=200.0).run()
    assert played.now <= 200 + 3 * 8 * 4
    assert 3 < len(found.all()) < 31
    assert found.default.speeds
    # However little time there is, the default is measured.
    little = Played(DEFAULT | {"a": (101.0, 0.005, 500.0)})
    assert search(Table("a"), little, seconds=1e-3).run().default.speeds


class TestNoise:
    def test_rounds_that_agree_by_chance_are_trusted_no_more_than_all_rounds_deserve(self) -> None:
        assert score([0.1, 0.1], usual=0.2).error == pytest.approx(0.2 / math.sqrt(2))
        assert score([0.1, 0.1], usual=0.0).margin(2) == 0.01

    def test_a_few_rounds_that_agree_do_not_make_a_quiet_machine(self) -> None:
        assert usual_deviation([]) == 0.05
        assert 0.03 < usual_deviation([[0.1, 0.1]]) < 0.05
        assert usual_deviation([[0.0, 0.01] * 50]) == pytest.approx(0.0087, abs=1e-4)

    def test_the_error_shrinks_with_rounds_and_one_burst_does_not_move_the_middle(self) -> None:
        few, many = score([0.0, 0.1] * 2, usual=0.05), score([0.0, 0.1] * 8, usual=0.05)
        assert few.error > 1.9 * many.error
        assert score([0.1, 0.1, 0.1, 3.0, 0.1], usual=0.0).value == 0.1

    def test_the_error_of_a_median_is_what_draws_show(self) -> None:
        draws = random.Random(0)
        medians = [score([draws.gauss(0, 1) for _ in range(14)], usual=1.0).value for _ in range(2000)]
        assert deviation([medians]) == pytest.approx(score([0.0] * 14, usual=1.0).error, rel=0.1)

    def test_deviation_is_about_each_groups_own_mean(self) -> None:
        assert deviation([[0.0, 0.2], [5.0, 5.2], [9.0]]) == pytest.approx(math.sqrt(0.02))
        assert deviation([[1.0], []]) is None

    def test_beating_is_beyond_both_margins(self) -> None:
        assert Score(0.3, 0.1).beats(Score(0.0, 0.1), trust=2)
        assert not Score(0.2, 0.1).beats(Score(0.0, 0.1), trust=2)
        assert not Score(0.009, 0.0).beats(Score(0.0, 0.0), trust=2)


def test_the_frontier_has_what_no_other_betters_in_all_three() -> None:
    default = Standing(candidate("default"), Judgement(fidelity=fidelity(0.008)), peak_mib=500.0)
    found = Standings(default, Bounds(0.01), WEIGHTS)
    for label, value, kl, mib in (
        ("a", 0.3, 0.02, 600.0),
        ("b", 0.2, 0.02, 700.0),
        ("c", -0.5, 0.001, 900.0),
    ):
        standing = Standing(candidate(label), Judgement(fidelity=fidelity(kl)), peak_mib=mib)
        standing.ratios = [value]
        found.add(standing)
    assert [one.candidate.label for one in found.frontier()] == ["a", "default", "c"]


class TestJournal:
    TRUTH = DEFAULT | {
        "a": (120.0, 0.005, 500.0),
        "b": (105.0, 0.005, 500.0),
        "c": (60.0, 0.3, 500.0),
        "a2": (140.0, 0.005, 500.0),
    }

    def journaled(self, played: Played, path: Path) -> Search:
        measurer = JournaledMeasurer(played, Journal(path))
        pool = Table("a b c", {"a": "a2"})
        return Search(pool, measurer, Limits(Bounds(0.01), WEIGHTS, 1e6), lambda: 0.0, lambda one, all_: None)

    def test_a_search_that_was_ended_goes_on_and_measures_nothing_twice(self, tmp_path: Path) -> None:
        whole = Played(self.TRUTH)
        expected = self.journaled(whole, tmp_path / "whole").run()
        path = tmp_path / "journal"
        first = Played(self.TRUTH, ends_after=1)
        interrupted = self.journaled(first, path)
        with pytest.raises(KeyboardInterrupt):
            interrupted.run()
        assert interrupted.found is not None
        assert best(interrupted.found) is not None  # what is known is there
        second = Played(self.TRUTH, seed=1)
        found = self.journaled(second, path).run()
        assert best(found) == best(expected) == "a2"
        assert not set(first.judged) & set(second.judged)
        assert first.raced + second.raced == whole.raced
        third = Played(self.TRUTH)
        assert best(self.journaled(third, path).run()) == "a2"
        assert (third.judged, third.raced) == ([], [])

    def test_a_line_that_was_being_written_is_cut_off(self, tmp_path: Path) -> None:
        path = tmp_path / "journal"
        self.journaled(Played(self.TRUTH), path).run()
        content = path.read_bytes()
        last = content.splitlines(keepends=True)[-1]
        path.write_bytes(content[:-5])
        again = Played(self.TRUTH)
        self.journaled(again, path).run()
        assert len(again.raced) == 1
        assert path.read_bytes()[: len(content) - len(last)] == content[: len(content) - len(last)]
        assert len(path.read_bytes().splitlines()) == len(content.splitlines())

    def test_what_is_no_journal_counts_for_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "journal"
        path.write_bytes(b"\xff\x00[[[" * 100)
        assert Journal(path).taken_up == 0

    def test_failures_are_tried_again(self, tmp_path: Path) -> None:
        path = tmp_path / "journal"
        failing = Played(self.TRUTH, failing=frozenset({"a"}))
        assert best(self.journaled(failing, path).run()) == "b"
        assert best(self.journaled(Played(self.TRUTH), path).run()) == "a2"

    def test_a_journal_that_cannot_be_read_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "journal").mkdir()
        with pytest.raises(ResourceError, match=r"journal cannot be read \(Is a directory\); remove it"):
            Journal(tmp_path / "journal")
