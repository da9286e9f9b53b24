"""What is taken of a hub at most: bytes of each answer, files of a repository, room on the disk.

Input are the hub's answers, as its client's HTTP library tells of them; output is an error before more is
read. Whatever a hub lists or says, nothing of any size comes onto the disk or into memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from llorch_serve.errors import ResourceError

MOST_FILES: Final = 10_000
MOST_ANSWER_BYTES: Final = 2**23
_MOST_ANSWERS: Final = 1000  # to one question: the client asks again for as long as any bytes come
_SLACK_BYTES: Final = 2**16  # of pages that say why there is no file


class UnusableAnswerError(RuntimeError):
    """A hub sends more than it may, or what could do harm. The text goes on after "the hub"."""


class AnswerLimit:
    """Counts what comes, in the answers to one question or of one file.

    most: bytes; limit: how these are told. there: bytes of the file that an earlier call fetched.
    """

    def __init__(
        self,
        most: int = MOST_ANSWER_BYTES,
        limit: str = f"the {MOST_ANSWER_BYTES} bytes that an answer may have",
        *,
        there: int = 0,
    ) -> None:
        self._most = most
        self._limit = limit
        self._taken = there
        self._answers = 0

    def asking(self, request: Any) -> None:
        """Ask for answers as they are: a compressed one could be of any size."""
        request.headers["Accept-Encoding"] = "identity"

    def answered(self, response: Any) -> None:
        """Have the body counted while it is read. Raises UnusableAnswerError if it is compressed, or one of
        too many.
        """
        self._answers += 1
        if self._answers > _MOST_ANSWERS:
            raise UnusableAnswerError("ends its answers early, again and again")
        if response.headers.get("Content-Encoding", "").strip().lower() not in ("", "identity"):
            raise UnusableAnswerError("sends a compressed answer, which it was asked not to")
        if response.status_code == 200:  # otherwise it goes on with the file, or says why not
            self._taken = 0
        response.stream = self._counted(response.stream)

    def _counted(self, stream: Any) -> Any:
        # The class that the library wants a body to be of, in whichever library the client is built on.
        body = next(kind for kind in type(stream).__mro__ if kind.__name__ == "SyncByteStream")

        class Counted(body):  # type: ignore[misc, valid-type]  # known at run time
            def __iter__(_) -> Iterator[bytes]:  # noqa: N805 - self is the limit
                for piece in stream:
                    self._take(len(piece))
                    yield piece

            def close(_) -> None:  # noqa: N805
                stream.close()

        return Counted()

    def _take(self, count: int) -> None:
        self._taken += count
        if self._taken > self._most + _SLACK_BYTES:
            raise UnusableAnswerError(f"sends more than {self._limit}")


def limit_of_file(path: str, size: int | None, folder: Path, *, there: int = 0) -> AnswerLimit:
    """Return the limit of a file that is fetched into ``folder``.

    size: in bytes, as listed; a file of unknown size may take half of what is free on the disk.
    """
    if size is not None:
        return AnswerLimit(size, f"the {size} bytes that {path} should have", there=there)
    free = free_bytes(folder)
    return AnswerLimit(free // 2, f"half of the {free} bytes that the disk has free for {path}", there=there)


def require_room(folder: Path, needed: int, what: str) -> None:
    """Raise ResourceError if the disk of ``folder`` has not ``needed`` bytes free for ``what``."""
    free = free_bytes(folder)
    if needed > free:
        raise ResourceError(
            f"{what} needs {needed / 1e6:.1f} MB in {folder}, and the disk has {free / 1e6:.1f} MB free; "
            "remove something, or choose another disk"
        )


def free_bytes(folder: Path) -> int:
    """Return what is free on the disk of a folder, which need not be there yet."""
    place = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    return shutil.disk_usage(place).free
