"""Rounds over entries whose processes are scripts: whose turn it is, what a failure leaves, what is asked
when.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from llorch_serve.bench.entries import PlannedEntry
from llorch_serve.bench.process import ProblemError
from llorch_serve.bench.protocol import Settings
from llorch_serve.bench.rounds import Plan, compare
from llorch_serve.bench.schema import Entry, OfflineTest, Problem
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.providers import ProviderChoice
from support.builders.bench_reports import DECODE, PREFILL, Scripted

Log = list[tuple[str, str]]


def wanted(label: str) -> PlannedEntry:
    return PlannedEntry(label, ProviderChoice(label, ("a=1",), None, True), "python", Path("folder"))


def plan(*tests: OfflineTest, repeat: int = 1, reference: str | None = None) -> Plan:
    return Plan(
        tests=tests or (PREFILL,),
        longest=100,
        repeat=repeat,
        prompt_ids=(1, 2),
        tokenizer="tokenizer.json",
        reference=reference,
        settings=lambda one: Settings.of(SessionConfig(threads=3, provider=one.choice), 128),
    )


@pytest.fixture
def log() -> Log:
    return []


def run(processes: list[Scripted], asked: Plan) -> tuple[Entry, ...]:
    by_label = {process.label: process for process in processes}
    return compare([wanted(name) for name in by_label], asked, lambda one: by_label[one.label], lambda: None)  # type: ignore[arg-type,return-value]


def test_entries_take_turns_test_by_test_and_backwards_in_every_other_round(log: Log) -> None:
    order: list[tuple[str, str]] = []

    def note(label: str) -> Callable[[OfflineTest], dict[str, float]]:
        def noted(test: OfflineTest) -> dict[str, float]:
            order.append((label, test.work))
            return {"prefill_tokens_per_s": 1.0}

        return noted

    run([Scripted(label, log, note(label)) for label in "ab"], plan(PREFILL, DECODE, repeat=2))
    forth = [("a", "prefill"), ("b", "prefill"), ("a", "decode"), ("b", "decode")]
    back = [("b", "prefill"), ("a", "prefill"), ("b", "decode"), ("a", "decode")]
    assert order == forth + back + forth


def test_the_first_round_warms_up_and_the_others_count(log: Log) -> None:
    values = (float(number) for number in itertools.count(1))
    process = Scripted("a", log, lambda _test: {"prefill_tokens_per_s": next(values)})
    (found,) = run([process], plan(repeat=3))
    (row,) = found.rows
    assert row.figures["prefill_tokens_per_s"].values == (2.0, 3.0, 4.0)
    assert found.peak_rss_mib == 100.0
    assert found.fidelity is None


def test_what_a_process_is_told_to_open(log: Log) -> None:
    process = Scripted("a", log)
    run([process], plan())
    opened = process.opened
    assert opened is not None
    assert (opened.label, opened.longest, opened.prompt_ids) == ("a", 100, (1, 2))
    assert opened.tokenizer == "tokenizer.json"
    assert Path(opened.folder).is_absolute()
    session = SessionConfig(threads=3, provider=ProviderChoice("a", ("a=1",), None, True))
    assert opened.settings.config() == EngineConfig(session, prefill_chunk=128)


def test_fidelity_is_measured_when_all_memory_has_been_told(log: Log) -> None:
    found = run([Scripted("a", log), Scripted("b", log)], plan(reference="file"))
    assert [what for what in log if what[1] in ("Close", "Judge")] == [
        ("a", "Close"),
        ("b", "Close"),
        ("a", "Judge"),
        ("b", "Judge"),
    ]
    assert all(entry.fidelity is not None for entry in found)


@pytest.mark.parametrize("at", ["greet", "Open", "Run", "Close", "Judge"])
def test_one_that_fails_keeps_its_reason_and_the_others_go_on(log: Log, at: str) -> None:
    bad, good = Scripted("bad", log, fails_at=at), Scripted("good", log)
    failed, fine = run([bad, good], plan(reference="file"))
    assert failed.problem == Problem(exit_code=4, message=f"no luck at {at}")
    assert bool(failed.rows) == (at in ("Close", "Judge"))
    assert fine.problem is None
    assert fine.rows[0].figures
    assert fine.fidelity is not None
    assert bad.closed == good.closed == 1
    asked = [what for label, what in log if label == "bad"]
    assert asked[-1] == at, "asked on after it had failed"


def test_a_process_that_cannot_be_started_is_a_failed_entry(log: Log) -> None:
    def start(one: PlannedEntry) -> Scripted:
        if one.label == "bad":
            raise ProblemError(Problem(exit_code=4, message="cannot be run"))
        return Scripted(one.label, log)

    failed, fine = compare([wanted("bad"), wanted("good")], plan(), start, lambda: None)  # type: ignore[arg-type]
    assert failed.problem is not None
    assert (failed.label, failed.provider) == ("bad", "bad")
    assert fine.rows


def test_a_test_that_an_engine_cannot_do_fails_alone(log: Log) -> None:
    def only_prefill(test: OfflineTest) -> dict[str, float]:
        if test.work == "decode":
            raise ProblemError(Problem(exit_code=4, message="not that"), goes_on=True)
        return {"prefill_tokens_per_s": 1.0}

    (found,) = run([Scripted("a", log, only_prefill)], plan(PREFILL, DECODE, repeat=2))
    prefill, decode = found.rows
    assert found.problem is None
    assert len(prefill.figures["prefill_tokens_per_s"].values) == 2
    assert (decode.figures, decode.problem) == ({}, Problem(exit_code=4, message="not that"))
    assert [what for _, what in log].count("Run") == 3 + 1  # three rounds of one test, one try of the other


def test_processes_end_when_the_command_is_interrupted(log: Log) -> None:
    def interrupted(_test: OfflineTest) -> dict[str, float]:
        raise KeyboardInterrupt

    processes = [Scripted("a", log), Scripted("b", log, interrupted)]
    with pytest.raises(KeyboardInterrupt):
        run(processes, plan())
    assert [process.closed for process in processes] == [1, 1]
