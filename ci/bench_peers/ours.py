"""Our own recipes, measured as a user would: ``llorch export``, ``llorch bench``, ``llorch verify``."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from bench_peers.contestant import Closeness, Work
from bench_peers.machine import slug_of
from bench_peers.processes import first_output, run_process
from bench_peers.protocol import Measurement, ProtocolError
from bench_peers.reuse import Gains
from llorch_serve.bench.schema import Entry, Report
from llorch_serve.errors import ResourceError
from llorch_serve.fidelity.reference_file import ReferenceFile
from llorch_serve.python_child import module_command

DEFAULT: Final = "cpu-calibrated"
FAITHFUL: Final = "cpu-faithful"
SMALLEST: Final = "int4, int4 head"

EXPORTS: Final[dict[str, tuple[str, ...]]] = {
    DEFAULT: (),
    FAITHFUL: ("--recipe", "cpu-faithful"),
    "cpu-fast": ("--recipe", "cpu-fast"),
    SMALLEST: ("--precision", "int4", "--block-size", "64", "--head-precision", "int4"),
    "source": ("--precision", "source"),
}
"""Label in tables: what ``llorch export`` is told. Bench and verify run with their defaults."""

FIRST_TOKENS: Final = 8
"""Tokens that a command is asked for whose first one is timed: it must be ready to go on."""

_Document = TypeVar("_Document")
_LLORCH: Final = module_command(sys.executable, "llorch_serve")


class _Verified(msgspec.Struct):
    """The part of ``llorch verify --json`` that is read here."""

    kl: float
    top1: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """An artifact of ours. folder: where it lies once :meth:`export` has run.

    provider: what runs it, ``NAME@PYTHON`` as ``llorch bench --provider`` takes it; empty: the CPU, here.
    """

    label: str
    flags: tuple[str, ...]
    folder: Path
    provider: str = ""

    @property
    def ours(self) -> bool:
        """Yes."""
        return True

    @property
    def made(self) -> str:
        """The flags of ``llorch export``."""
        return f"`llorch export {' '.join(self.flags)}`" if self.flags else "`llorch export`, its default"

    def export(self, gguf: Path) -> None:
        """Make the artifact, unless it is there. Raises ResourceError if that fails."""
        run_process(*_LLORCH, "export", gguf, "--output", self.folder, "--if-changed", "--force", *self.flags)

    def measure(self, work: Work) -> list[Measurement]:
        """See :class:`bench_peers.contestant.Contestant`."""
        test = ("decode", "--depth", str(len(work.prompt_ids))) if work.filled else ("mixed",)
        output = run_process(
            *_LLORCH,
            *("bench", *self._where(), "--json", "--prompt-ids", work.prompt_file),
            *("--tests", *test, "--max-tokens", str(work.new_tokens)),
            *("--streams", ",".join(map(str, work.streams))),
            *("--repeat", str(work.repeat), "--threads", str(work.threads)),
            # A device takes the whole cache at the start.
            *(("--max-context", str(len(work.prompt_ids) + work.new_tokens)) if self.provider else ()),
        )
        entry = _entry(output)
        return [
            Measurement(
                engine="llorch",
                version=", ".join(entry.software).removeprefix("llorch ") if self.provider else version(),
                weights=self.label,
                streams=streams,
                prompt_tokens=len(work.prompt_ids),
                new_tokens=work.new_tokens,
                prefill_tokens_per_s=None if work.filled else row.figures["prefill_tokens_per_s"].median,
                decode_tokens_per_s=row.figures["decode_tokens_per_s"].median,
                peak_mib=entry.peak_rss_mib,
            )
            for streams, row in zip(work.streams, entry.rows, strict=True)
        ]

    def closeness(self, reference: ReferenceFile, scratch: Path, threads: int) -> Closeness:
        """See :class:`bench_peers.contestant.Contestant`. A divergence beyond the recipe's limit is reported
        like any.
        """
        if self.provider:
            output = run_process(
                *_LLORCH,
                *("bench", *self._where(), "--json", "--reference", reference.path, "--tests", "prefill"),
                *("--prompt-tokens", "16", "--streams", "1", "--repeat", "1", "--threads", str(threads)),
            )
            kept = _entry(output).fidelity
            if kept is None:
                raise ProtocolError("llorch bench printed no fidelity")
            return Closeness(kept.kl, kept.top1)
        output = run_process(
            *_LLORCH, "verify", self.folder, "--reference", reference.path, "--json", accept=(0, 1)
        )
        found = _decoded(output, _Verified)
        return Closeness(found.kl, found.top1)

    def _where(self) -> tuple[Path | str, ...]:
        return ("--provider", f"{self.provider}={self.folder}") if self.provider else (self.folder,)

    def first_token_s(self, text: str, threads: int) -> float:
        """See :class:`bench_peers.contestant.Contestant`. ``llorch generate``, to a pipe."""
        return first_output(
            *_LLORCH,
            *("generate", self.folder, "--prompt", text, "--max-tokens", str(FIRST_TOKENS)),
            *("--temperature", "0", "--threads", str(threads)),
        ).first_s

    def gains(self, work: Work) -> Gains:
        """Return one round of what guesses and reuse gain. Raises as ``measure``."""
        output = run_process(
            *module_command(sys.executable, "bench_peers.reuse", str(self.folder)),
            *(str(work.threads), str(work.new_tokens), str(len(work.prompt_ids))),
        )
        return _decoded(output, Gains)


def _entry(output: str) -> Entry:
    """Return the one entry of a report. Raises ResourceError if it was not measured."""
    (entry,) = _decoded(output, Report).entries
    problem = entry.problem or next((row.problem for row in entry.rows if row.problem is not None), None)
    if problem is not None:
        raise ResourceError(f"llorch bench did not measure: {problem.message}")
    return entry


def version() -> str:
    """Return llorch's version and the runtime's."""
    return f"{importlib.metadata.version('llorch')}, onnxruntime {importlib.metadata.version('onnxruntime')}"


def all_recipes(cache: Path) -> list[Recipe]:
    """Return every recipe, with its folder under ``cache``."""
    return [Recipe(label, flags, cache / slug_of(label)) for label, flags in EXPORTS.items()]


def _decoded(output: str, kind: type[_Document]) -> _Document:
    try:
        return msgspec.json.decode(output, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"llorch printed another document than expected: {error}") from error
