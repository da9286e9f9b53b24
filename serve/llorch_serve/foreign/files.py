"""Reading the files of a folder that another tool made. Everything in it is untrusted: sizes and places are
checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from llorch_serve.artifact.links import link_roots
from llorch_serve.errors import ArtifactError
from llorch_serve.files.json_errors import NOT_JSON

MAX_JSON_BYTES: Final = 16 * 2**20
MAX_TOKENIZER_JSON_BYTES: Final = 128 * 2**20
MAX_TEXT_BYTES: Final = 2**20
MAX_FILES: Final = 1000

T = TypeVar("T")


class ForeignFolder:
    """A folder, and access to the files that really lie in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, name: str) -> Path | None:
        """Return the path of a file, or None if there is none. Raises ArtifactError if it is outside the
        folder.
        """
        path = self.path / name
        try:
            real = path.resolve()
            inside = any(real.is_relative_to(root) for root in link_roots(self.path))
            if not path.is_file():
                return None
        except (
            OSError,
            ValueError,
            RuntimeError,
        ) as error:  # a loop of links, a NUL, a name that is too long
            raise ArtifactError(
                f"{self.path} names {name[:100]!r}, which is not a usable file name "
                f"({type(error).__name__}); "
                "build the folder again"
            ) from error
        if not inside:
            raise ArtifactError(
                f"{path} is outside the model's folder; copy the files themselves into it (cp -rL) instead "
                f"of links"
            )
        return path

    def required(self, name: str, advice: str) -> Path:
        """Return the path of a file. Raises ArtifactError, with ``advice``, if it is missing."""
        path = self.file(name)
        if path is None:
            raise ArtifactError(f"{self.path / name} is missing; {advice}")
        return path

    def names(self, folder: str, ending: str) -> list[str]:
        """Return the names of the files in a folder inside this one that end in ``ending``, sorted; at most
        MAX_FILES.
        """
        try:
            inside = (self.path / folder).resolve().is_relative_to(self.path.resolve())
            found = (self.path / folder).iterdir() if inside else ()
            return sorted(
                name for name in islice((p.name for p in found), MAX_FILES) if name.endswith(ending)
            )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ArtifactError(
                f"{self.path / folder} cannot be read ({error.strerror}); correct it or remove it"
            ) from error

    def read_json(self, name: str, kind: type[T], *, limit: int = MAX_JSON_BYTES) -> T | None:
        """Return a file's content as ``kind``, or None if there is no file. Raises ArtifactError if it does
        not fit.
        """
        data = self._read(name, limit)
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=kind)
        except NOT_JSON as error:
            raise ArtifactError(
                f"{self.path / name} is not what was expected: {error}; build it again"
            ) from error

    def read_text(self, name: str) -> str | None:
        """Return a file's text, or None if there is no file. Raises ArtifactError if it is too long or not
        UTF-8.
        """
        data = self._read(name, MAX_TEXT_BYTES)
        try:
            return None if data is None else data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ArtifactError(
                f"{self.path / name} is not UTF-8 text ({error.reason}); build it again"
            ) from error

    def total_bytes(self) -> int:
        """Return the size of all files: about what the loaded graph will occupy."""
        return sum(path.stat().st_size for path in self._files())

    def fingerprint(self) -> str:
        """Return the SHA-256 over the names and contents of all files."""
        digest = hashlib.sha256()
        for path in self._files():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256")
            digest.update(f"{path.relative_to(self.path).as_posix()}\0".encode() + content.digest())
        return digest.hexdigest()

    def _files(self) -> Iterator[Path]:
        found = list(islice((path for path in self.path.rglob("*") if path.is_file()), MAX_FILES + 1))
        if len(found) > MAX_FILES:
            raise ArtifactError(
                f"{self.path} holds more than {MAX_FILES} files; name the folder that holds the model alone"
            )
        for path in sorted(found):
            name = path.relative_to(self.path).as_posix()
            # The versions of a Kubernetes volume, whose files the names outside of them link to.
            if not name.startswith("..") and self.file(name) is not None:
                yield path

    def _read(self, name: str, limit: int) -> bytes | None:
        path = self.file(name)
        if path is None:
            return None
        try:
            size = path.stat().st_size
            if size > limit:
                raise ArtifactError(f"{path} has {size} bytes, expected at most {limit}; build it again")
            return path.read_bytes()
        except OSError as error:
            raise ArtifactError(
                f"{path} cannot be read ({error.strerror}); correct its permissions"
            ) from error
