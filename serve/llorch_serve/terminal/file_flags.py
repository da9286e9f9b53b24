"""Flags of ``llorch serve`` about files and batches over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llorch_serve.config import read_size
from llorch_serve.errors import UsageError
from llorch_serve.http.batches.settings import BatchSettings
from llorch_serve.terminal.groups import FlagGroup


class FileFlags(FlagGroup, frozen=True):
    """Where files and batches of callers are kept, and how much of them."""

    batch_folder: Annotated[
        Path | None,
        typer.Option(
            "--batch-folder",
            metavar="DIR",
            file_okay=False,
            help="With --http: serve /v1/files and /v1/batches, and keep files and batches in this folder, "
            "which no other worker uses. Default: neither is served.",
            show_default=False,
        ),
    ] = None
    batch_quota: Annotated[
        str,
        typer.Option(
            "--batch-quota",
            metavar="SIZE",
            help="With --batch-folder: what one caller's files and results may take, like 1GiB.",
        ),
    ] = "1GiB"
    batch_quota_total: Annotated[
        str,
        typer.Option(
            "--batch-quota-total", metavar="SIZE", help="With --batch-folder: what all callers' may take."
        ),
    ] = "8GiB"
    batch_files: Annotated[
        int,
        typer.Option(
            "--batch-files",
            min=1,
            max=4000,
            help="With --batch-folder: most files, and most batches, of one caller.",
        ),
    ] = 500
    batch_in_flight: Annotated[
        int | None,
        typer.Option(
            "--batch-in-flight",
            min=1,
            metavar="N",
            help="With --batch-folder: most answers to lines of all batches that are made at once. Default: "
            "one less than there are slots, which leaves one to whoever waits for an answer.",
            show_default=False,
        ),
    ] = None

    def read(self, http: str | None) -> BatchSettings | None:
        """Return the settings, None if nothing is kept. http: where the front listens, None: nowhere.

        Raises UsageError for flags that have no effect, and for sizes that are none.
        """
        if self.batch_folder is None or http is None:
            missing = "--http" if self.batch_folder is not None else "--batch-folder"
            for flag in self.given():
                raise UsageError(f"{flag} has no effect without {missing}; leave it out, or add {missing}")
            return None
        quota = read_size("--batch-quota", self.batch_quota)
        total = read_size("--batch-quota-total", self.batch_quota_total)
        assert quota is not None
        assert total is not None
        return BatchSettings(
            self.batch_folder,
            caller_bytes=quota,
            total_bytes=total,
            caller_files=self.batch_files,
            in_flight=self.batch_in_flight,
        )
