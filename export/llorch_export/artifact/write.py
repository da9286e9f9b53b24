"""Writing an artifact folder so that it is either whole or not there.

Everything goes into a temporary folder next to the destination, which ``replace.py`` moves there as the last
step. Weights are streamed, a chunk of rows at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path, PurePosixPath
from types import TracebackType

import numpy as np

from llorch_export.artifact.disk_errors import disk_errors
from llorch_export.artifact.place import check_output, real_place
from llorch_export.artifact.replace import NEW, clear_leftovers, standing, take_place, temporary
from llorch_export.graph.weights import WeightJob
from llorch_serve.artifact.lock import exclusive
from llorch_serve.artifact.manifest import FileEntry
from llorch_serve.errors import ResourceError
from llorch_serve.files.durable import flush_folder, flush_tree

_PIECE = 2**22  # bytes hashed at once


class ArtifactWriter:
    """Collects files in a temporary folder next to ``output`` and moves them into place at the end.

    Use as a context manager, which holds the output from its start to its end: leaving it without
    :meth:`commit` removes everything that was written. Raises UsageError if ``output`` is taken (by an
    artifact, unless ``force``; by anything else, always) or another export has it.
    """

    def __init__(self, output: Path, *, force: bool) -> None:
        self.output = output
        self.entries: list[FileEntry] = []
        self._force = force
        self._place = real_place(output)
        self._held = contextlib.ExitStack()

    def __enter__(self) -> ArtifactWriter:
        """Take the output, look at what stands there and make the temporary folder."""
        check_output(self.output, force=self._force)
        with contextlib.ExitStack() as held, disk_errors(self.output):
            # Innermost first: removed again, if empty, when the export fails.
            parents = [parent for parent in self._place.parents if not parent.exists()]
            held.callback(_remove_empty, parents)
            self._place.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(exclusive(self._place))
            clear_leftovers(self._place)
            check_output(
                self.output, force=self._force
            )  # what came back is replaced only if that was asked for
            self._before = standing(self._place)
            self.folder = temporary(self._place, NEW)
            held.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.folder.chmod(
                0o755
            )  # a temporary folder's 0700 would hide the artifact from a worker of another user
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what was not committed, and give the output back."""
        self._held.close()

    def require_space(self, nbytes: int) -> None:
        """Raise ResourceError if the disk has less than ``nbytes`` free."""
        free = shutil.disk_usage(self.folder).free
        if free < nbytes:
            raise ResourceError(
                f"{self.output.parent} has {free / 2**20:.0f} MiB free and the artifact needs "
                f"{nbytes / 2**20:.0f} MiB; "
                "free some space or choose another --output"
            )

    def add_bytes(self, name: str, data: bytes) -> None:
        """Write a small file and list it."""
        with disk_errors(self.output):
            (self.folder / name).write_bytes(data)
        self.entries.append(_entry(name, len(data), hashlib.sha256(data).hexdigest()))

    def add_unlisted(self, name: str, data: bytes) -> None:
        """Write the manifest itself, which cannot list its own hash."""
        with disk_errors(self.output):
            (self.folder / name).write_bytes(data)

    def add_written(self, name: str, progress: Callable[[int], None]) -> None:
        """List a file that was written into the folder by other means; ``progress`` is told the bytes
        read.
        """
        digest = hashlib.sha256()
        with disk_errors(self.output), (self.folder / name).open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                progress(len(piece))
            self.entries.append(_entry(name, file.tell(), digest.hexdigest()))

    def add_weights(self, name: str, jobs: tuple[WeightJob, ...], progress: Callable[[int], None]) -> None:
        """Run the jobs and stream their arrays to their offsets; ``progress`` is told bytes as they are done.

        The chunks of a job's tensors come in turns and land in different places, so each job is hashed once
        it is written, while the system still has its pages at hand.
        """
        digest = hashlib.sha256()
        hashed = 0
        with disk_errors(self.output), (self.folder / name).open("w+b", buffering=0) as file:
            for job in jobs:
                _write_job(file, job)
                end = max(tensor.offset + tensor.nbytes for tensor in job.tensors)
                file.seek(hashed)
                while hashed < end:
                    piece = file.read(min(_PIECE, end - hashed))
                    assert piece, "a file being written is as long as what was written"
                    digest.update(piece)
                    hashed += len(piece)
                    progress(len(piece))
        self.entries.append(_entry(name, hashed, digest.hexdigest()))

    def commit(self) -> None:
        """Move the folder into place once the disk has all of it; an artifact that stood there is replaced,
        or put back if that fails.

        Raises ArtifactError if anything but what stood there at the beginning stands there now.
        """
        with disk_errors(self.output):
            flush_tree(self.folder)
            take_place(self.folder, self._place, self._before)
            flush_folder(self._place.parent)


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # not empty: the artifact is there
            folder.rmdir()


def _write_job(file: FileIO, job: WeightJob) -> None:
    """Write a job's chunks to their places; a function, so that no array outlives its job."""
    places = [tensor.offset for tensor in job.tensors]
    for arrays in job.chunks():
        for index, array in enumerate(arrays):
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            file.seek(places[index])
            places[index] += len(data)
            while len(data):  # a raw file may take less than it is given
                data = data[file.write(data) :]
        del arrays, array, data  # else they would live on while the next chunk is made


def _entry(name: str, nbytes: int, sha256: str) -> FileEntry:
    return FileEntry(path=str(PurePosixPath(name)), bytes=nbytes, sha256=sha256)
