"""Batches whose input or output is a Parquet file, where pyarrow is installed.

Rows are written out as JSON Lines before the batch runs, so that they can be read in any order; a table of
answers is made of the journal when the batch is done, as nothing can be added to a Parquet file.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from llorch_serve.batch.lines import MAX_LINE_BYTES
from llorch_serve.batch.sources import MAX_ANSWER_BYTES, RawLine, whole_lines
from llorch_serve.errors import ProviderError, UsageError
from llorch_serve.files.durable import flush_folder
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.files.text import encode_json

COLUMNS: Final = ("custom_id", "method", "url", "body", "prompt", "messages")
_ASKED: Final = ("body", "prompt", "messages")  # a table has one of them
_ROWS: Final = 256  # that are held at once
_BUFFER: Final = 2**20


def is_parquet(path: Path) -> bool:
    """Whether a file's name says that it is a table."""
    return path.suffix.lower() == ".parquet"


class ParquetSource:
    """The rows of a Parquet file. left_aside: columns that no line is made of."""

    def __init__(self, path: Path, folder: Path) -> None:
        """Open the file. folder: for its rows as lines. Raises UsageError, ProviderError, OSError."""
        _, parquet = _pyarrow()
        self._path = path
        self._sha256 = ""
        with _readable(path):
            self._table = parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
        names = self._table.schema_arrow.names
        self._columns = [name for name in COLUMNS if name in names]
        self.left_aside = tuple(name for name in names if name not in COLUMNS)
        if not set(_ASKED) & set(names):
            self._table.close()
            raise UsageError(
                f"{path} has the columns {', '.join(names)}; expected custom_id, url and body, or prompt, or "
                "messages: rename one"
            )
        self._lines = (folder / "rows.jsonl").open("w+b")

    def scan(self) -> Iterator[RawLine]:
        """Yield every row as a line. Raises UsageError, OSError."""
        with self._path.open("rb") as file:
            self._sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        place = 0
        for number, row in enumerate(self._rows(), 1):
            raw = encode_json({name: _value(name, value) for name, value in row.items() if value is not None})
            if len(raw) > MAX_LINE_BYTES:
                yield RawLine(number, place, len(raw), None)
                continue
            self._lines.write(raw)
            yield RawLine(number, place, len(raw), raw)
            place += len(raw)
        self._lines.flush()

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        batches = self._table.iter_batches(batch_size=_ROWS, columns=self._columns)
        while True:
            with _readable(self._path):
                batch = next(batches, None)
                rows = batch.to_pylist() if batch is not None else []
            if batch is None:
                return
            yield from rows

    def sha256(self) -> str:
        """Return the hash of the file's bytes, which have been scanned."""
        return self._sha256

    def read(self, place: int, size: int) -> bytes:
        """Return the bytes of one line."""
        self._lines.seek(place)
        return self._lines.read(size)

    def close(self) -> None:
        """Close both files."""
        self._table.close()
        self._lines.close()


def write_parquet(journal: Path, failures: Path, output: Path) -> None:
    """Write the table of a batch that is done: a row for each line, those that failed at its end.

    Raises ProviderError without pyarrow, OSError.
    """
    pyarrow, parquet = _pyarrow()
    schema = _schema(pyarrow)
    unfinished = output.with_name(f".{output.name}.part")
    try:
        with parquet.ParquetWriter(unfinished, schema) as writer:
            rows = itertools.chain(_answers(journal), _answers(failures))
            while some := list(itertools.islice(rows, _ROWS)):
                writer.write_batch(pyarrow.RecordBatch.from_pylist(some, schema=schema), row_group_size=_ROWS)
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(output)
        flush_folder(output.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            unfinished.unlink(missing_ok=True)
        raise


def _answers(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for raw in whole_lines(file, most=MAX_ANSWER_BYTES):
            assert isinstance(raw, bytes)
            line = msgspec.json.decode(raw)
            response = line["response"] or {}
            error = line["error"] or {}
            body = response.get("body")
            yield {
                "id": line["id"],
                "custom_id": line["custom_id"],
                "status_code": response.get("status_code"),
                "request_id": response.get("request_id"),
                "text": _text(body),
                "body": None if body is None else msgspec.json.encode(body).decode(),
                "error_code": error.get("code"),
                "error_message": error.get("message"),
            }


def _text(body: Any) -> str | None:
    """Return the first text that a model wrote, in the places where the routes have it."""
    try:
        choice = body["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (KeyError, IndexError, TypeError):
        return None
    return text if isinstance(text, str) else None


def _schema(pyarrow: Any) -> Any:
    texts = ("text", "body", "error_code", "error_message")
    return pyarrow.schema(
        [("id", pyarrow.string()), ("custom_id", pyarrow.string()), ("status_code", pyarrow.int32())]
        + [("request_id", pyarrow.string())]
        + [(name, pyarrow.large_string()) for name in texts]
    )


def _value(name: str, value: Any) -> Any:
    """Return a column's value as a line has it: a table has no absent fields, and keeps JSON as text."""
    if name == "custom_id" and isinstance(value, int):
        return str(value)
    if name in ("body", "messages"):
        if isinstance(value, str):
            try:
                return msgspec.json.decode(value)
            except NOT_JSON:
                return value
        return _present(value)
    return value


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _present(item) for name, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ProviderError(
            f"{error.name} is not installed, and Parquet files are read and written by it; install it with: "
            "pip install 'llorch[parquet]'"
        ) from error
    return pyarrow, pyarrow.parquet


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what pyarrow says of a file into a refusal."""
    pyarrow, _ = _pyarrow()
    try:
        yield
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; give a file of Parquet or JSON Lines") from None
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path} cannot be read as Parquet: {reason}") from None
