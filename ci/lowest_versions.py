"""Prints what pyproject.toml declares, each at its lowest version: ``python ci/lowest_versions.py cpu,http``.

Needs the standard library alone, since it runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

_ENTRY = re.compile(r"([A-Za-z0-9_.-]+)(?:\[([a-z,]+)\])?(?:(?:>=|==)([0-9.]+)(?:,<[0-9.]+)?)?")


def lowest_versions(project: dict[str, Any], extras: list[str]) -> dict[str, str]:
    """Return package -> requirement of its lowest version, of all dependencies and ``extras``; an extra may
    name others.

    Raises ValueError for an entry that says no lowest version, or says it in another way than ``>=`` and
    ``==``.
    """
    found: dict[str, str] = {}
    optional = project["optional-dependencies"]
    for entry in (*project["dependencies"], *(entry for extra in extras for entry in optional[extra])):
        match = _ENTRY.fullmatch(entry)
        name, brackets, version = match.groups() if match else (entry, None, None)
        if name == project["name"]:
            found |= lowest_versions(project, brackets.split(","))
        elif version is None:
            raise ValueError(f"{entry}: expected NAME>=VERSION, as ci/test-versions installs that version")
        else:
            found[name] = f"{name}{f'[{brackets}]' if brackets else ''}=={version}"
    return found


if __name__ == "__main__":
    declared = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    sys.stdout.writelines(f"{line}\n" for line in lowest_versions(declared, sys.argv[1].split(",")).values())
