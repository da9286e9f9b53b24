"""Documents that llorch wrote and is given back: reports and evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from llorch_serve.errors import UsageError
from llorch_serve.files.json_errors import NOT_JSON

D = TypeVar("D", bound=msgspec.Struct)


def read_document(path: Path, kind: type[D], *, what: str, made_by: str, most_bytes: int) -> D:
    """Return a document. what: it is called, its schema's version included. made_by: the command that writes
    it.

    Raises UsageError for anything else.
    """
    try:
        if path.stat().st_size > most_bytes:
            raise UsageError(f"{path} has over {most_bytes} bytes; expected what {made_by} wrote")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}); expected what {made_by} wrote"
        ) from error
    except NOT_JSON as error:
        raise UsageError(f"{path} is no {what}: {error}; make it again with {made_by}") from error
