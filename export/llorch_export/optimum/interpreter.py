"""The interpreter that has Optimum: finding out what is installed there, and running the export in it.

optimum-onnx takes another transformers than llorch is used with, so it runs in a process of its own, and
usually in an environment of its own. Input is a folder that :mod:`.staging` made; output are the files that
Optimum wrote.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec

from llorch_serve.errors import ArtifactError, ProviderError, UsageError
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.python_child import child_environment, foreign_code_command, foreign_module_command

_PACKAGES: Final = ("optimum-onnx", "transformers", "torch", "onnx")
_PROBE: Final = f"""
import importlib.metadata, json
found = {{d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}}
print(json.dumps({{name: found[name] for name in {_PACKAGES!r} if name in found}}))
"""
_PROBE_LIMIT_S: Final = 60
_EXPORT_LIMIT_S: Final = 3600
_LOG_TAIL_BYTES: Final = 2**16
_SHOWN_CHARACTERS: Final = 500
# What is read is on disk already, and nothing else may be fetched in its place.
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TQDM_DISABLE": "1"}


@dataclass(frozen=True, slots=True)
class Optimum:
    """An interpreter that has optimum-onnx, and the versions of the packages that shape its graphs."""

    python: str
    versions: Mapping[str, str]


def find_optimum(python: str | None) -> Optimum:
    """Ask an interpreter, by default this one, what it has.

    Raises UsageError if it cannot be run, ProviderError if it lacks optimum-onnx.
    """
    python = python or sys.executable
    try:
        done = subprocess.run(
            foreign_code_command(python, _PROBE),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env=child_environment(),
            timeout=_PROBE_LIMIT_S,
        )
        versions = msgspec.json.decode(done.stdout, type=dict[str, str])
    except (OSError, subprocess.TimeoutExpired, *NOT_JSON) as error:
        raise UsageError(
            f"--optimum-python {python} is not a Python interpreter that can be run ({error}); name one "
            f"that has optimum-onnx"
        ) from error
    if "optimum-onnx" not in versions:
        raise ProviderError(
            f"{python} has no optimum-onnx, which --via optimum needs. It takes an older transformers, so "
            f"give it an "
            f"environment of its own: {python} -m venv optimum && optimum/bin/pip install torch "
            f"optimum-onnx; then say "
            "--optimum-python optimum/bin/python"
        )
    return Optimum(python, versions)


def run_optimum(optimum: Optimum, model: Path, output: Path) -> None:
    """Export the folder ``model`` to the new folder ``output`` in fp32, with a cache.

    Raises ArtifactError with Optimum's own last words if it fails, or takes more than an hour.
    """
    command = foreign_module_command(optimum.python, "optimum.exporters.onnx", "--model", str(model))
    options = [
        "--task",
        "text-generation-with-past",
        "--framework",
        "pt",
        "--dtype",
        "fp32",
        "--device",
        "cpu",
    ]
    with tempfile.TemporaryFile() as log:
        try:
            done = subprocess.run(
                [*command, *options, str(output)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(**_OFFLINE),
                timeout=_EXPORT_LIMIT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ArtifactError(
                f"Optimum was not done after {_EXPORT_LIMIT_S} s and was ended; export without --via, or a "
                f"smaller model"
            ) from error
        if done.returncode != 0:
            raise ArtifactError(
                f"Optimum failed with exit code {done.returncode}: {_last_words(log)}. Export without "
                f"--via, or with "
                "another optimum-onnx"
            )


def _last_words(log: IO[bytes]) -> str:
    """Return the last line that a process wrote, which in a traceback is the error."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
    lines = log.read().decode("utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return last[:_SHOWN_CHARACTERS]
