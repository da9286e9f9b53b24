"""Safe access to the files of a model folder.

Input is a folder that a stranger may have filled; output are paths and contents that are known to lie inside
it, or where :mod:`llorch_serve.artifact.links` says that a link may lead, and to be of bounded size.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llorch_export.config.fields import quoted
from llorch_serve.artifact.links import open_inside, open_real, real_file
from llorch_serve.errors import ArtifactError

MAX_VOCABULARY_BYTES: Final = 2**26
"""Of a file that holds a vocabulary. Published files have up to 2**25."""

MAX_JSON_BYTES: Final = 2**23
"""Of all other JSON. Published files have up to 2**21; a JSON of 8 MiB may take 200 MiB of memory."""

MAX_TEXT_BYTES: Final = 2**20
_ESCAPED_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"
# Terms that travel along with the weights.
LICENCE_FILE: Final = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|USE_POLICY)\b.*", re.IGNORECASE)


def require_content(path: Path, real: Path) -> None:
    """Raise ArtifactError if a file only stands for one in Git's large file storage.

    real: where it really lies. Raises OSError if it cannot be read.
    """
    with open_real(real) as file:
        _require_content(path, file.read(len(_LFS_POINTER)))


def _require_content(path: Path, data: bytes) -> None:
    if data.startswith(_LFS_POINTER):
        raise ArtifactError(
            f"{path} is a pointer of Git LFS, not the file itself; fetch it with: git lfs pull"
        )


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that holds a model, or, with ``whole``, one inside it."""

    path: Path
    whole: Path | None = None

    def find(self, name: str) -> Path | None:
        """Return the path of a file directly inside the folder, or None if there is nothing of that name.

        Raises ArtifactError if ``name`` or a link leads out of the folder, or to anything but a file: what is
        there and cannot be read must not count as absent.
        """
        if not name or Path(name).name != name or "\\" in name or "\0" in name:
            raise ArtifactError(
                f"{self.path} refers to the file {quoted(name)}; expected a plain name inside the folder"
            )
        path = self.path / name
        if not os.path.lexists(path):
            return None
        if not path.is_file():
            what = "a link to nothing" if path.is_symlink() and not path.exists() else "no regular file"
            raise ArtifactError(
                f"{path} is {what}, expected a file; fetch it again, or remove it if the model has none"
            )
        real_file(path, self.whole or self.path)
        return path

    def entries(self, matches: Callable[[str], object]) -> tuple[Path, ...]:
        """Return what lies directly inside the folder and whose name ``matches``, sorted, files or not.
        Raises ArtifactError if the folder cannot be read.
        """
        try:
            return tuple(sorted(entry for entry in self.path.iterdir() if matches(entry.name)))
        except OSError as error:
            raise ArtifactError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def files(self, matches: Callable[[str], object]) -> tuple[Path, ...]:
        """Return the files directly inside the folder whose name ``matches``, sorted; folders are left out.
        Raises as :meth:`find` does.
        """
        found = (self.find(entry.name) for entry in self.entries(matches) if not entry.is_dir())
        return tuple(path for path in found if path is not None)

    def read_bytes(self, name: str, *, limit: int) -> bytes | None:
        """Return a file's content, or None if there is none. Raises ArtifactError beyond ``limit`` bytes."""
        path = self.find(name)
        if path is None:
            return None
        try:
            with open_inside(path, self.whole or self.path) as file:
                data = file.read(limit + 1)
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
        _require_content(path, data)
        if len(data) > limit:
            raise ArtifactError(
                f"{path} has more than {limit} bytes, which no such file needs; fetch it again"
            )
        return data

    def read_text(self, name: str) -> str | None:
        """Return a small UTF-8 file's content, or None if there is none."""
        data = self.read_bytes(name, limit=MAX_TEXT_BYTES)
        if data is None:
            return None
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{self.path / name} is not UTF-8 text; fetch it again") from error

    def read_json(self, name: str) -> dict[str, object] | None:
        """Return a JSON object, or None if there is no such file. Raises ArtifactError if it is anything
        else.
        """
        value = self.read_value(name)
        if value is None and self.find(name) is None:
            return None
        if not isinstance(value, dict):
            raise ArtifactError(f"{self.path / name} holds {type(value).__name__}, expected a JSON object")
        return value

    def read_value(self, name: str) -> object:
        """Return what a file of JSON holds, or None if there is no such file. Raises ArtifactError if it is
        no JSON.
        """
        data = self.read_bytes(name, limit=MAX_JSON_BYTES)
        if data is None:
            return None
        try:
            value: object = json.loads(data.decode("utf-8-sig"))
            # Half a surrogate pair, written as an escape, is JSON and yet no text: no tokenizer and no file
            # takes it.
            if _ESCAPED_SURROGATE.search(data):
                json.dumps(value, ensure_ascii=False).encode("utf-8")
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{self.path / name} is not valid JSON: {error}; fetch it again") from error
        return value
