"""Runs of ``ci/bench`` that nobody has measured: every engine has its speed, on a machine that drifts."""

from __future__ import annotations

from typing import Any

import msgspec

from bench_peers.ours import DEFAULT, FAITHFUL, SMALLEST
from bench_peers.peers import GENAI, LLAMA_CPP, OPENVINO
from bench_peers.protocol import Measurement
from bench_peers.results import Machine, Run, Subject
from bench_peers.reuse import PROMPTS, Gains, LookupGain, Tie

KL = {
    DEFAULT: 0.004,
    FAITHFUL: 0.0027,
    SMALLEST: 0.5,
    "source": 0.003,
    LLAMA_CPP: 0.0026,
    GENAI: 0.33,
    OPENVINO: 0.3,
}
SPEED = {
    DEFAULT: 120.0,
    FAITHFUL: 100.0,
    SMALLEST: 160.0,
    "source": 90.0,
    LLAMA_CPP: 80.0,
    GENAI: 100.0,
    OPENVINO: 90.0,
}
OURS = (DEFAULT, FAITHFUL, SMALLEST, "source")


def measured(label: str, round_index: int) -> list[Measurement]:
    """Return one turn's measurements."""
    streams = (1,) if label == GENAI else (1, 8, 32)
    drift = (1.0, 0.5, 1.1)[round_index]  # of the whole machine: ratios stay
    return [
        Measurement(label, "1", "w", n, 512, 128, 1000 * drift, SPEED[label] * drift * n, 100.0 * n)
        for n in streams
    ]


def gains(**parted: Tie) -> Gains:
    """Return one round's gains. parted: by text, where its answers part."""
    lookup = [LookupGain(name, 100.0, 190.0, 20, 15, parted.get(name)) for name in PROMPTS]
    return Gains(lookup, 600.0, 30.0, 512, 512)


def run(**changes: Any) -> Run:
    """Return a run of three rounds, of which some fields may be others."""
    subjects = [Subject(label, label in OURS, "1", "so", kl, 0.9) for label, kl in KL.items()]
    base = Run(
        date="2026-01-01",
        command="ci/bench",
        machine=Machine("A CPU", 2, ["avx2"], 16.0, "Linux", 0.0),
        threads=2,
        prompt_tokens=512,
        new_tokens=128,
        positions=2048,
        oracle="transformers",
        subjects=subjects,
        rounds=[{label: measured(label, index) for label in KL} for index in range(3)],
        gains_of=DEFAULT,
        gains=[gains()] * 3,
    )
    return msgspec.structs.replace(base, **changes)
