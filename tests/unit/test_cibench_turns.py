"""Rounds by turns and the sections of the smaller benches: medians, ratios, and what is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from bench_peers import experts, gemma3
from bench_peers.contestant import Closeness, Work
from bench_peers.models import spell_as_before
from bench_peers.protocol import Measurement
from bench_peers.results import Machine
from bench_peers.reuse import Gains
from bench_peers.rounds import OPENING, run_rounds
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

    starts: list[str] = field(default_factory=list)

    def measure(self, work: Work) -> list[Measurement]:
        return speeds(work.streams, 10.0, rounds=1)

    def first_token_s(self, text: str, threads: int) -> float:
        self.starts.append(f"{text}, {threads}")
        return float(len(self.starts))

    def gains(self, work: Work) -> Gains:
        return Gains([], 1.0, 1.0, 0, 0)


def work(*streams: int) -> Work:
    return Work(tuple(range(8)), Path("x"), 4, streams, 1, 2)


def test_every_engine_has_a_turn_in_each_round_and_every_other_round_runs_backwards() -> None:
    turns: list[str] = []
    found = by_turns([Engine("a"), Engine("b")], work(1), 3, turns.append)
    assert [turn.rpartition(" ")[2] for turn in turns] == ["a", "b", "b", "a", "a", "b"]
    assert {label: len(of) for label, of in found.items()} == {"a": 3, "b": 3}


def test_a_command_is_started_twice_a_turn_and_the_second_time_counts() -> None:
    ours, theirs = Engine("ours", ours=True), Engine("theirs")
    found = run_rounds([ours], [theirs], ours, work(1), 3, lambda _turn: None)
    assert found.first_token_s == [{"ours": float(n), "theirs": float(n)} for n in (2, 4, 6)]
    assert ours.starts == [f"{OPENING}, 2"] * 6
    assert (len(found.rounds), len(found.gains)) == (3, 3)


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


def test_rotary_settings_by_kind_of_layer_are_spelled_as_both_versions_of_transformers_read_them(
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.json"
    by_kind = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    for given, expected in (
        ({"rope_parameters": by_kind}, {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        ({"rope_parameters": {"rope_theta": 5e5}}, {"rope_parameters": {"rope_theta": 5e5}}),
        ({}, {}),
    ):
        file.write_text(json.dumps(given), encoding="utf-8")
        spell_as_before(file)
        assert json.loads(file.read_text(encoding="utf-8")) == expected


def test_experts_are_held_against_the_dense_size() -> None:
    found = {"ours": speeds((1,), 7.0), "dense": speeds((1,), 10.0), "theirs": speeds((1,), 5.0)}
    matches = [Match("int4: experts to dense", "ours", "dense", 0.8), Match("to llama.cpp", "ours", "theirs")]
    text = experts.section(MACHINE, work(1), matches, found)
    assert "| decode, int4: experts to dense | >= 0.8 | 0.70 (0.70 to 0.70) | **no** |" in text
    assert "| decode, to llama.cpp |  | 1.40 (1.40 to 1.40) |  |" in text
    assert experts.DENSE.intermediate == experts.EXPERTS.active * experts.EXPERTS.intermediate
