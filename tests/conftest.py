"""Fixtures shared by all tiers: the real model, exported once a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import expected_skips
from support.harness.cores import all_cores, take_share
from support.harness.made_once import made_once

# The same cases in every run, so that a change is judged by itself and not by luck; none is timed, because
# machines are busy. `ci/test --hypothesis-profile explore` draws new cases.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Let processes that tests start be interrupted, even where the runner itself was started in the
    background, and have them run on this process's share of the cores.
    """
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # as a shell does for `ci/test &`, and children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    take_share()


REPOSITORY = Path(__file__).resolve().parent.parent

_surprises: list[tuple[str, str]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note skips that are not in the list of those that may happen."""
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note files that are skipped whole."""
    _note_skip(report)


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    # An expected failure is reported as skipped too; what became of it is pytest's to judge.
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not expected_skips.is_expected(report.nodeid, reason):
            _surprises.append((report.nodeid, reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Have what a test printed pass between processes: names that are not UTF-8 hold surrogates."""
    report = yield
    report.sections = [
        (title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections
    ]
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a process of pytest-xdist's has noted: what it skips whole is not told here."""
    for noted in getattr(node, "workeroutput", {}).get("surprises", ()):
        if noted not in _surprises:
            _surprises.append(noted)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of ci/ that skipped what it should not have."""
    told = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["surprises"] = _surprises
        return
    if _surprises and os.environ.get(expected_skips.VARIABLE):
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\n{expected_skips.complaint(_surprises)}", file=sys.stderr)  # noqa: T201 - as a last word


@pytest.fixture(scope="module")
def every_core() -> Iterator[None]:
    """All cores for what a module's tests start, not only the share of this process of pytest-xdist's."""
    with all_cores():
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as GGUF: where LLORCH_TEST_MODEL says, else fetched and checked by
    ci/fetch-model.
    """
    if value := os.environ.get("LLORCH_TEST_MODEL"):
        return Path(value)
    result = subprocess.run(
        [REPOSITORY / "ci" / "fetch-model"], check=True, stdout=subprocess.PIPE, text=True
    )
    return Path(result.stdout.strip())


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M as GGUF, fetched and checked by ci/fetch-model; for tests with the marker slow."""
    result = subprocess.run(
        [REPOSITORY / "ci" / "fetch-model", "gemma3"], check=True, stdout=subprocess.PIPE, text=True
    )
    return Path(result.stdout.strip())


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_gguf: Path) -> Any:
    """transformers on the same file, in fp32."""
    import torch
    import transformers

    names = {"gguf_file": smollm2_gguf.name, "dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2_gguf.parent, **names).eval()


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that exports the real model: ``smollm2("int4", "--block-size", "64")`` -> artifact
    folder.
    """

    def export(precision: str, *flags: str) -> Path:
        command = [
            sys.executable,
            "-m",
            "llorch_serve",
            "export",
            str(smollm2_gguf),
            "--precision",
            precision,
        ]

        def make(folder: Path) -> None:
            subprocess.run([*command, *flags, "--output", str(folder)], check=True)

        return made_once(tmp_path_factory, f"smollm2/{'-'.join((precision, *flags)).replace('--', '')}", make)

    return export
