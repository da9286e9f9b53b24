"""``llorch batch`` on the real model, and against replicas that Ray runs: 500 lines, killed twice."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.harness.broken_off import broken_off
from support.harness.processes import llorch_here, serving

pytestmark = pytest.mark.slow

LINES = 500
WORDS = ("time", "water", "light", "house", "garden", "river", "stone", "music", "paper", "window")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """500 lines, half of them sampled, of which some begin alike."""
    draw = random.Random(9)
    shared = " ".join(draw.choices(WORDS, k=10))
    path = tmp_path_factory.mktemp("batch") / "in.jsonl"
    with path.open("w") as file:
        for number in range(LINES):
            words = " ".join(draw.choices(WORDS, k=draw.randint(1, 6)))
            text = f"{shared if number % 3 == 0 else ''} {words}"
            body = {"prompt": text, "max_tokens": draw.randint(1, 8), "temperature": number % 2}
            line = {"custom_id": f"q-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def killed_twice(source: Path, folder: Path, *where: object) -> None:
    """Run a file that is killed twice, and one that is not; compare what they have written."""
    unbroken, output = folder / "unbroken.jsonl", folder / "out.jsonl"
    assert llorch_here("batch", source, unbroken, *where, "--ordered").code == 0
    for size in (50_000, 120_000):
        killed = broken_off("killed", size, output, "batch", source, output, *where, "--ordered")
        assert killed.code == -signal.SIGKILL, killed
    outcome = llorch_here("batch", source, output, *where, "--ordered", "--json")
    assert 0 < outcome.document()["answered_before"] < LINES
    assert output.read_bytes() == unbroken.read_bytes()
    ids = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    assert ids == [f"q-{number}" for number in range(LINES)]


def test_the_real_model(smollm2: Callable[..., Path], source: Path, tmp_path: Path) -> None:
    killed_twice(source, tmp_path, smollm2("int8"), "--max-context", "512")


def test_weights_of_four_bits(smollm2: Callable[..., Path], source: Path, tmp_path: Path) -> None:
    killed_twice(source, tmp_path, smollm2("int4"), "--max-context", "512")


def test_two_replicas(tiny: Path, source: Path, tmp_path: Path) -> None:
    with serving(tiny, "--replicas", "2", "--no-prefix-cache", "--slots", "4", "--threads", "1") as front:
        killed_twice(source, tmp_path, "--connect", front.address)
