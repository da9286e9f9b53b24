"""Opening a batch's input by what its name says it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from llorch_serve.batch.sources import JsonLinesSource, Source
from llorch_serve.batch.tables import ParquetSource, is_parquet


@contextlib.contextmanager
def open_source(path: Path, folder: Path) -> Iterator[Source]:
    """Open an input. folder: an empty one, where the rows of a table lie meanwhile.

    Raises UsageError, ProviderError where a library is missing, OSError.
    """
    source: Source = ParquetSource(path, folder) if is_parquet(path) else JsonLinesSource(path)
    try:
        yield source
    finally:
        source.close()
