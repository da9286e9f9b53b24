"""Rounds by turns and the sections of the smaller benches: medians, ratios, and what is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench_peers import experts, gemma3
from bench_peers.contestant import Closeness, Work
from bench_peers.protocol import Measurement
from bench_peers.results import Machine
from bench_peers.turns import Match, by_turns

MACHINE = Machine("A CPU", 2, [], 16, "Linux", 0.1)


def speeds(streams: tuple[int, ...], decode: float, rounds: int = 2) -> list[Measurement]:
    return [
        Measurement(
            engine="engine",
            version="1",
            weights="w",
            streams=count,
            prompt_tokens=8,
            new_tokens=4,
            prefill_tokens_per_s=100.0,
            decode_tokens_per_s=decode * count,
            peak_mib=9.0,
        )
        for _ in range(rounds)
        for count in streams
    ]


@dataclass
class Engine:
    """A contestant that measures nothing."""

    label: str
    ours: bool = False
    made: str = "by hand"

    def measure(self, work: Work) -> list[Measurement]:
        return speeds(work.streams, 10.0, rounds=1)


def work(*streams: int) -> Work:
    return Work(tuple(range(8)), Path("x"), 4, streams, 1, 2)


def test_every_engine_has_a_turn_in_each_round_and_every_other_round_runs_backwards() -> None:
    turns: list[str] = []
    found = by_turns([Engine("a"), Engine("b")], work(1), 3, turns.append)
    assert [turn.rpartition(" ")[2] for turn in turns] == ["a", "b", "b", "a", "a", "b"]
    assert {label: len(of) for label, of in found.items()} == {"a": 3, "b": 3}


def test_gemma_is_compared_with_each_peer_and_what_does_not_take_it_is_named() -> None:
    default = next(iter(gemma3.RECIPES))
    found = {default: speeds((1, 8), 30.0), "llama.cpp": speeds((1, 8), 20.0), "genai": speeds((1,), 15.0)}
    close = {label: Closeness(0.01, 0.9) for label in found}
    engines = [Engine(default, ours=True), Engine("llama.cpp"), Engine("genai")]
    text = gemma3.section(MACHINE, work(1, 8), close, found, engines, {"OpenVINO": "unknown op"})
    assert f"| {default} | 0.01 | 90.0% | 100.0 | 30.0 | 240.0 | 9 |" in text
    assert "| genai | 0.01 | 90.0% | 100.0 | 15.0 |  | 9 |" in text
    assert "| decode, to llama.cpp |  | 1.50 (1.50 to 1.50) |  |" in text
    assert "- OpenVINO does not take the model: unknown op" in text
    assert "1 and 8 streams, 2 threads, 2 rounds" in text


def test_experts_are_held_against_the_dense_size() -> None:
    found = {"ours": speeds((1,), 7.0), "dense": speeds((1,), 10.0), "theirs": speeds((1,), 5.0)}
    matches = [Match("int4: experts to dense", "ours", "dense", 0.8), Match("to llama.cpp", "ours", "theirs")]
    text = experts.section(MACHINE, work(1), matches, found)
    assert "| decode, int4: experts to dense | >= 0.8 | 0.70 (0.70 to 0.70) | **no** |" in text
    assert "| decode, to llama.cpp |  | 1.40 (1.40 to 1.40) |  |" in text
    assert experts.DENSE.intermediate == experts.EXPERTS.active * experts.EXPERTS.intermediate
