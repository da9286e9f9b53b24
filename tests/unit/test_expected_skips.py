"""A skip that nobody expects fails the run of ci/test; one in the list does not, nor any in a run by hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from expected_skips import VARIABLE, is_expected

TESTS = Path(__file__).resolve().parent.parent


def outcome(folder: Path, body: str, *flags: str, strict: str = "1") -> tuple[int, str]:
    place = folder / "tests" / "unit"
    place.mkdir(parents=True)
    for name in ("conftest.py", "expected_skips.py"):
        shutil.copy(TESTS / name, folder / "tests")
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = tests {TESTS}\n")
    (place / "test_huge_pages.py").write_text(f"import pytest\n{body}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags],
        cwd=folder,
        env=os.environ | {VARIABLE: strict},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


ONE = "def test_a(): pytest.skip({reason!r})\ndef test_b(): pass"
SURPRISE = ONE.format(reason="a library is missing")


@pytest.mark.parametrize(
    ("body", "flags"),
    [
        (SURPRISE, ()),
        (SURPRISE, ("-k", "test_a")),
        ("pytest.importorskip('no_such_module_anywhere')", ()),
        ("@pytest.mark.skip(reason='later')\ndef test_a(): pass\ndef test_b(): pass", ()),
        (SURPRISE, ("--numprocesses=2",)),
        ("pytest.importorskip('no_such_module_anywhere')", ("--numprocesses=2",)),
    ],
    ids=["skip", "alone", "whole file", "mark", "two processes", "whole file, two processes"],
)
def test_a_surprise_fails_the_run_and_is_told(tmp_path: Path, body: str, flags: tuple[str, ...]) -> None:
    code, said = outcome(tmp_path, body, *flags)
    assert code == 1, said
    assert "error: 1 skipped that tests/expected_skips.py does not expect" in said
    assert "tests/unit/test_huge_pages.py" in said


@pytest.mark.parametrize(
    ("body", "flags", "strict"),
    [
        (SURPRISE, (), ""),
        (SURPRISE, ("-k", "test_b"), "1"),
        (ONE.format(reason="huge pages: the kernel has none"), (), "1"),
        ("@pytest.mark.xfail\ndef test_a(): assert False", (), "1"),
        (ONE.format(reason="huge pages: the kernel has none"), ("--numprocesses=2",), "1"),
        (r"def test_a(): print('caf\udce9')", ("--numprocesses=2",), "1"),
    ],
    ids=["by hand", "not selected", "expected", "expected failure", "two processes", "printed surrogates"],
)
def test_what_is_expected_passes(tmp_path: Path, body: str, flags: tuple[str, ...], strict: str) -> None:
    code, said = outcome(tmp_path, body, *flags, strict=strict)
    assert (code, "error:" in said) == (0, False), said


def test_an_expected_reason_is_expected_of_its_own_test_alone() -> None:
    assert is_expected("tests/unit/test_huge_pages.py::test_a", "Skipped: huge pages: none")
    assert not is_expected("tests/unit/test_other.py::test_a", "Skipped: huge pages: none")
    assert not is_expected("tests/unit/test_huge_pages.py::test_a", "Skipped: no numpy")
