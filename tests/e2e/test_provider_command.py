"""A provider that is not on this machine ends the command within seconds, with what is missing and what there
is.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from llorch_serve.providers.table import PROVIDERS
from support.harness.processes import llorch, llorch_here

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is absent differs by system")

ABSENT = [row for row in PROVIDERS if row.name != "cpu"]


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_cuda_on_a_machine_without_it(tiny: Path, command: str) -> None:
    flags = ("--prompt", "x") if command == "generate" else ("--port", "0")
    started = time.perf_counter()
    outcome = llorch(command, tiny, "--provider", "cuda", *flags)
    assert time.perf_counter() - started < 6
    assert outcome.code == 4
    message = outcome.stderr.splitlines()[-1]
    assert "the wheel onnxruntime-gpu is not installed" in message
    assert "libcuda.so.1" in message
    assert "available here: CPUExecutionProvider" in message


@pytest.mark.parametrize("row", ABSENT, ids=[row.name for row in ABSENT])
def test_each_absent_provider_is_refused(tiny: Path, row) -> None:
    outcome = llorch_here("generate", tiny, "--prompt", "x", "--provider", row.name)
    assert outcome.code == 4
    assert row.wheel in outcome.error()
    assert "available here: CPUExecutionProvider" in outcome.error()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--provider", "cdua"), "did you mean cuda?"),
        (("--provider", "cuda", "--provider-option", "gpu_mem_limt=1"), "did you mean gpu_mem_limit?"),
        (("--provider-option", "use_arena=maybe"), "cpu takes 0 or 1 there"),
        (("--ep-library", "/nowhere/lib.so"), "/nowhere/lib.so, which is no file"),
    ],
)
def test_slips_are_refused_by_name(tiny: Path, flags: tuple[str, ...], says: str) -> None:
    outcome = llorch_here("generate", tiny, "--prompt", "x", *flags)
    assert outcome.code == 4
    assert says in outcome.error()


def test_a_file_that_is_no_library_is_refused(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "libnothing.so"
    path.write_text("not a library")
    outcome = llorch_here("generate", tiny, "--prompt", "x", "--ep-library", path)
    assert outcome.code == 4
    assert "libnothing.so cannot be loaded as a provider" in outcome.error()


def test_the_cpu_may_be_named(tiny: Path) -> None:
    flags = (
        "--prompt",
        "x",
        "--max-tokens",
        "3",
        "--temperature",
        "0",
        "--json",
        "--provider-option",
        "use_arena=0",
    )
    named = llorch_here("generate", tiny, *flags, "--provider", "CPU").document()
    assert named["token_ids"] == llorch_here("generate", tiny, *flags[:-2]).document()["token_ids"]
