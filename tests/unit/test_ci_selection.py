"""Every test is run by a script: what ``ci/test`` leaves out by its marker, another script of ci/ asks
for.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def test_each_marker_that_is_left_out_has_a_script() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    options = settings["tool"]["pytest"]["ini_options"]["addopts"]
    expression = options[options.index("-m") + 1]
    left_out = set(re.findall(r"\w+", expression)) - {"not", "and"}
    asked = {
        marker
        for script in (REPOSITORY / "ci").iterdir()
        if script.is_file()
        for marker in re.findall(r"pytest -m (\w+) tests\b", script.read_text(encoding="utf-8"))
    }
    assert left_out == asked
    assert len(left_out) > 5


def test_no_file_skips_itself_for_a_package_that_no_extra_brings() -> None:
    """Such a file is skipped by every script; a marker and a script of its own would run it."""
    brought = {
        "llguidance",
        "matplotlib",
        "pyarrow",
        "torch",
        "transformers",
    }  # by the extras that ci/test installs
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        for package in re.findall(r"pytest\.importorskip\(\"(\w+)\"", path.read_text(encoding="utf-8")):
            assert package in brought, f"{path.name}: {package}"
