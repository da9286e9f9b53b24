"""What whoever runs a worker decides of files and batches over HTTP. Made of flags; nothing here needs the
libraries of the front.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """folder: where files and batches are kept.

    caller_bytes, total_bytes: that files, uploads and results take together, of one caller and of all.
    caller_files: most files, and most batches, that one caller has. total_files: that all have; their records
        are in memory.
    in_flight: most answers to lines of all batches that are made at once; None: one less than the model has
        slots, where it has several.
    """

    folder: Path
    caller_bytes: int = 2**30
    total_bytes: int = 8 * 2**30
    caller_files: int = 500
    total_files: int = 4000
    in_flight: int | None = None
