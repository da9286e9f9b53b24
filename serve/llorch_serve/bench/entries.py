"""What is to be compared: ``--provider NAME[@PYTHON][=DIR]`` to a provider, an interpreter and a folder that
fit each other.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llorch_serve.artifact.folder import is_artifact, load_artifact
from llorch_serve.errors import ProviderError, UsageError
from llorch_serve.providers import CPU, ProviderChoice, check_target
from llorch_serve.providers.options import read_options
from llorch_serve.providers.table import find_provider


@dataclass(frozen=True, slots=True)
class PlannedEntry:
    """One entry as asked for. label: unlike every other's. python: the interpreter that runs it."""

    label: str
    choice: ProviderChoice
    python: str
    folder: Path


@dataclass(frozen=True, slots=True)
class _Spec:
    name: str
    python: str | None
    folder: Path | None


def find_entries(
    specs: Sequence[str],
    folder: Path | None,
    options: Sequence[str],
    library: Path | None,
    *,
    cpu_nodes: bool,
) -> list[PlannedEntry]:
    """Return the entries, every one of which has been checked as far as that goes without a runtime.

    specs: of ``--provider``; none: the CPU, or the only provider of ``library``. folder: what an entry
        without one runs.
    options: of ``--provider-option``, each ``KEY=VALUE`` or, where there are several entries,
        ``NAME:KEY=VALUE``.
    Raises UsageError for what cannot be read, ProviderError for names, options, interpreters and artifacts
    that do not fit.
    """
    parsed = [_read(spec) for spec in specs]
    if library is not None and len(parsed) > 1:
        raise UsageError(
            "--ep-library names the library of one provider, and there are several; measure it on its own"
        )
    if not parsed:
        choice = ProviderChoice(None, _options_of(None, options, alone=True), library, cpu_nodes)
        label = "cpu" if library is None else library.stem
        return [_checked(PlannedEntry(label, choice, sys.executable, _given(folder, label)))]
    unclaimed = set(options)
    # It is for the others among several entries; where there is none, the CPU's refuses it.
    elsewhere = [
        spec for spec in parsed if library is not None or find_provider(spec.name).runtime_name != CPU
    ]
    found = []
    for spec in parsed:
        mine = _options_of(spec.name, options, alone=len(parsed) == 1)
        unclaimed -= {option for option in options if _claims(spec.name, option) or len(parsed) == 1}
        choice = ProviderChoice(spec.name, mine, library, cpu_nodes and (spec in elsewhere or not elsewhere))
        python = sys.executable if spec.python is None else _interpreter(spec.python)
        found.append(PlannedEntry(spec.name, choice, python, spec.folder or _given(folder, spec.name)))
    if unclaimed:
        names = ", ".join(spec.name for spec in parsed)
        raise UsageError(
            f"--provider-option {sorted(unclaimed)[0]} belongs to none of {names}; with several providers "
            f"write NAME:KEY=VALUE"
        )
    return [_checked(wanted) for wanted in _labelled(found)]


def _read(spec: str) -> _Spec:
    left, gives_folder, folder = spec.partition("=")
    name, gives_python, python = left.partition("@")
    if not name or (gives_folder and not folder) or (gives_python and not python):
        raise UsageError(
            f"--provider is {spec!r}; expected NAME[@PYTHON][=DIR], like "
            f"openvino@/opt/ov/bin/python=artifacts/ov"
        )
    return _Spec(name, python or None, Path(folder) if folder else None)


def _given(folder: Path | None, label: str) -> Path:
    if folder is None:
        raise UsageError(f"{label} has no model; name one for all, or its own with --provider {label}=DIR")
    return folder


def _interpreter(python: str) -> str:
    found = shutil.which(python)
    if found is None:
        raise ProviderError(
            f"{python} is no interpreter; expected the python of an environment that has the provider and "
            f"llorch"
        )
    return found


def _claims(name: str, option: str) -> bool:
    return option.partition("=")[0].startswith(f"{name}:")


def _options_of(name: str | None, options: Sequence[str], *, alone: bool) -> tuple[str, ...]:
    mine = []
    for option in options:
        if name is not None and _claims(name, option):
            mine.append(option.removeprefix(f"{name}:"))
        elif alone:
            mine.append(option)
    return tuple(mine)


def _labelled(entries: list[PlannedEntry]) -> list[PlannedEntry]:
    """Return the entries with labels that differ: with the folder's name where providers repeat, then with a
    number.
    """
    names = Counter(entry.label for entry in entries)
    longer = [
        replace(entry, label=f"{entry.label}:{entry.folder.resolve().name}")
        if names[entry.label] > 1
        else entry
        for entry in entries
    ]
    seen: Counter[str] = Counter()
    labelled = []
    for entry in longer:
        seen[entry.label] += 1
        times = seen[entry.label]
        labelled.append(entry if times == 1 else replace(entry, label=f"{entry.label}#{times}"))
    return labelled


def _checked(wanted: PlannedEntry) -> PlannedEntry:
    """Raise ProviderError for a misspelt provider or option, and for an artifact that the provider does not
    run.
    """
    if wanted.choice.library is not None:
        return wanted  # whatever it brings, only the library knows
    row = find_provider(wanted.choice.name or "cpu")
    read_options(row.name, row.options, wanted.choice.options)
    if is_artifact(wanted.folder):
        check_target(load_artifact(wanted.folder).manifest.target, row.runtime_name)
    return wanted
