"""Where a batch's output lies, and that only one run writes it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llorch_serve.artifact.lock import exclusive
from llorch_serve.batch.header import header_path
from llorch_serve.errors import UsageError


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """An output that nobody else writes while this is held."""

    output: Path

    @property
    def errors(self) -> Path:
        """Where lines go that failed."""
        return self.output.with_name(f"{self.output.name}.errors.jsonl")

    @property
    def header(self) -> Path:
        """Where it is kept what both were made from."""
        return header_path(self.output)

    @property
    def work_folder(self) -> Path:
        """For what a run needs meanwhile: empty when it begins, and gone when it has ended."""
        return self.output.with_name(f".{self.output.name}.work")


@contextlib.contextmanager
def hold_output(output: Path) -> Iterator[OutputPlace]:
    """Hold an output for one run. Raises BeingWrittenError while another has it, UsageError, OSError."""
    if output.exists() and not output.is_file():
        raise UsageError(f"{output} is no file, and a batch goes on from its output; give a file")
    place = OutputPlace(Path(os.path.realpath(output)))  # a link is no second output
    if not place.output.parent.is_dir():
        raise UsageError(f"{place.output.parent} is no folder; make it first, or choose another output")
    for path in (place.errors, place.header, place.work_folder):
        if path.is_symlink():
            raise UsageError(f"{path} is a link, and a file or folder of that name is needed; remove it")
    with exclusive(place.output, "batch", "output"):
        shutil.rmtree(place.work_folder, ignore_errors=True)  # of a run that was killed
        place.work_folder.mkdir()
        try:
            yield place
        finally:
            shutil.rmtree(place.work_folder, ignore_errors=True)
