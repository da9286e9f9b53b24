"""What every engine of a run can do, ours or a peer's, and how the processes that do it are started."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from bench_peers.protocol import Measurement
from llorch_serve.errors import ResourceError
from llorch_serve.fidelity.reference_file import ReferenceFile

_LIMIT_S: Final = 3600
"""Longest that one process may take; 32 streams of the slowest peer need some minutes."""


@dataclass(frozen=True, slots=True)
class Work:
    """What every engine is given. prompt_file: ``prompt_ids`` as a JSON array."""

    prompt_ids: tuple[int, ...]
    prompt_file: Path
    new_tokens: int
    streams: tuple[int, ...]
    repeat: int
    threads: int


@dataclass(frozen=True, slots=True)
class Closeness:
    """Divergence from the reference: mean KL in nats, and the share of equal likeliest tokens, 0..1."""

    kl: float
    top1: float


class Contestant(Protocol):
    """One engine with one model."""

    @property
    def label(self) -> str:
        """Its name in tables; unique."""

    @property
    def ours(self) -> bool:
        """Whether it is llorch."""

    @property
    def made(self) -> str:
        """How its weights were made."""

    def measure(self, work: Work) -> list[Measurement]:
        """Do the work in a process of its own. Raises ResourceError if it fails, ProtocolError for odd
        answers.
        """

    def closeness(self, reference: ReferenceFile, scratch: Path, threads: int) -> Closeness:
        """Run the reference's text and compare; ``scratch`` is a folder for big files. Raises as
        ``measure``.
        """


def run_process(
    *arguments: Path | str,
    stdin: str = "",
    python_path: Path | None = None,
    accept: tuple[int, ...] = (0,),
) -> str:
    """Run a program and return its stdout.

    python_path: the one folder that PYTHONPATH shall name, for an interpreter other than this one; None
        leaves it alone.
    accept: exit codes that are no failure. Raises ResourceError, with the last line the program said.
    """
    line = [str(argument) for argument in arguments]
    environment = dict(os.environ)
    if python_path is not None:
        environment.pop("VIRTUAL_ENV", None)
        environment["PYTHONPATH"] = str(python_path)
    try:
        done = subprocess.run(
            line,
            input=stdin,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ResourceError(f"{' '.join(line[:4])} took over {_LIMIT_S} seconds and was ended") from error
    if done.returncode not in accept:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
        raise ResourceError(f"{' '.join(line[:4])} ended with {done.returncode}: {last[0][:300]}")
    return done.stdout
