"""What every engine of a run can do, ours or a peer's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench_peers.protocol import Measurement
from llorch_serve.fidelity.reference_file import ReferenceFile


@dataclass(frozen=True, slots=True)
class Work:
    """What every engine is given. prompt_file: ``prompt_ids`` as a JSON array.

    filled: contexts hold the prompts before the clock starts, so that decoding alone is timed.
    warm_up: peers do the work once before it counts; ours always do.
    """

    prompt_ids: tuple[int, ...]
    prompt_file: Path
    new_tokens: int
    streams: tuple[int, ...]
    repeat: int
    threads: int
    filled: bool = False
    warm_up: bool = True


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

    def first_token_s(self, text: str, threads: int) -> float:
        """Return seconds from the start of a process that loads the model and continues ``text`` to the first
        byte that it prints. Raises as ``measure``.
        """
