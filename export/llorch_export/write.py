"""Writing an artifact folder so that it is either whole or not there.

Everything goes into a temporary folder beside the destination; the last step is a rename. Weights are streamed,
a chunk of rows at a time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path, PurePosixPath
from types import TracebackType

import numpy as np

from llorch_export.graph.weights import WeightJob
from llorch_serve.artifact import is_artifact
from llorch_serve.errors import ArtifactError, ResourceError, UsageError
from llorch_serve.manifest import FileEntry

_PIECE = 2**22  # bytes hashed at once


class ArtifactWriter:
    """Collects files in a temporary folder beside ``output`` and moves them into place at the end.

    Use as a context manager: leaving it without :meth:`commit` removes everything that was written.
    Raises UsageError if ``output`` is taken (by an artifact, unless ``force``; by anything else, always).
    """

    def __init__(self, output: Path, *, force: bool) -> None:
        check_output(output, force=force)
        self.output = output
        self.entries: list[FileEntry] = []
        with _disk_errors(output):
            # Innermost first: removed again, if empty, when the export fails.
            self._new_parents = [parent for parent in output.parents if not parent.exists()]

    def __enter__(self) -> ArtifactWriter:
        """Make the temporary folder."""
        with _disk_errors(self.output):
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.folder = Path(
                tempfile.mkdtemp(prefix=f".{self.output.name}.", suffix=".partial", dir=self.output.parent)
            )
            self.folder.chmod(0o755)  # mkdtemp's 0700 would hide the artifact from a worker of another user
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what was not committed."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for parent in self._new_parents:
            with contextlib.suppress(OSError):  # not empty: the artifact is there
                parent.rmdir()

    def require_space(self, nbytes: int) -> None:
        """Raise ResourceError if the disk has less than ``nbytes`` free."""
        free = shutil.disk_usage(self.folder).free
        if free < nbytes:
            raise ResourceError(
                f"{self.output.parent} has {free / 2**20:.0f} MiB free and the artifact needs {nbytes / 2**20:.0f} MiB; "
                "free some space or choose another --output"
            )

    def add_bytes(self, name: str, data: bytes) -> None:
        """Write a small file and list it."""
        with _disk_errors(self.output):
            (self.folder / name).write_bytes(data)
        self.entries.append(_entry(name, len(data), hashlib.sha256(data).hexdigest()))

    def add_unlisted(self, name: str, data: bytes) -> None:
        """Write the manifest itself, which cannot list its own hash."""
        with _disk_errors(self.output):
            (self.folder / name).write_bytes(data)

    def add_written(self, name: str, progress: Callable[[int], None]) -> None:
        """List a file that was written into the folder by other means; ``progress`` is told the bytes read."""
        digest = hashlib.sha256()
        with _disk_errors(self.output), (self.folder / name).open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                progress(len(piece))
            self.entries.append(_entry(name, file.tell(), digest.hexdigest()))

    def add_weights(self, name: str, jobs: tuple[WeightJob, ...], progress: Callable[[int], None]) -> None:
        """Run the jobs and stream their arrays to their offsets; ``progress`` is told bytes as they are done.

        The chunks of a job's tensors come in turns and land in different places, so each job is hashed once it is
        written, while the system still has its pages at hand.
        """
        digest = hashlib.sha256()
        hashed = 0
        with _disk_errors(self.output), (self.folder / name).open("w+b", buffering=0) as file:
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
            os.fsync(file.fileno())
        self.entries.append(_entry(name, hashed, digest.hexdigest()))

    def commit(self) -> None:
        """Move the folder into place; an artifact already there is replaced, or put back if that fails."""
        with _disk_errors(self.output):
            if not self.output.exists():
                self.folder.rename(self.output)
                return
            aside = Path(
                tempfile.mkdtemp(prefix=f".{self.output.name}.", suffix=".old", dir=self.output.parent)
            )
            old = aside / "artifact"
            try:
                self.output.rename(old)
                self.folder.rename(self.output)
            except BaseException:  # an interrupt between the two must not cost the old artifact either
                if os.path.lexists(old) and not os.path.lexists(self.output):
                    old.rename(self.output)
                raise
            finally:
                shutil.rmtree(aside, ignore_errors=True)


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


def check_output(output: Path, *, force: bool) -> None:
    """Raise UsageError if an artifact may not be written to ``output``, ArtifactError if that cannot be told."""
    with _disk_errors(output):
        if not output.exists():
            return
        if not output.is_dir():
            raise UsageError(f"{output} is a file; --output names the artifact's folder")
        if is_artifact(output):
            if not force:
                raise UsageError(
                    f"{output} already holds an artifact; replace it with --force, or use --if-changed"
                )
        elif any(output.iterdir()):
            raise UsageError(
                f"{output} is a folder that llorch did not make; choose a new --output, it would be replaced as a whole"
            )


def _entry(name: str, nbytes: int, sha256: str) -> FileEntry:
    return FileEntry(path=str(PurePosixPath(name)), bytes=nbytes, sha256=sha256)


@contextlib.contextmanager
def _disk_errors(output: Path) -> Iterator[None]:
    """Turn the operating system's refusals into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"the disk of {output} is full ({error.strerror}); free some space or choose another --output"
            ) from error
        raise ArtifactError(
            f"cannot write {output}: {error.strerror or error}; check the path and its permissions"
        ) from error
