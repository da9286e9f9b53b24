"""What is kept of a file and of a batch: one record each.

Input: requests, and records that were written before. Output: records as they lie on disk, and the objects
that OpenAI's clients read.
"""

from __future__ import annotations

import enum
import re
import secrets
from typing import Any, Final

import msgspec

FILE_ID: Final = re.compile(r"file-[0-9a-f]{32}")
BATCH_ID: Final = re.compile(r"batch_[0-9a-f]{32}")

INPUT_PURPOSE: Final = "batch"
OUTPUT_PURPOSE: Final = "batch_output"


class Status(enum.Enum):
    """How far a batch is, in OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED: Final = frozenset({Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED})


class FileRecord(msgspec.Struct, frozen=True):
    """One file. owner: whose it is, where the worker knows its callers; else empty.

    number: files of a higher one are newer. filename: what the caller calls it; it names nothing on disk.
    created_at, expires_at: Unix time in seconds; None: it is kept until it is deleted.
    """

    id: str
    owner: str
    number: int
    size: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None

    def document(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Fault(msgspec.Struct, frozen=True):
    """Why a batch failed. line: of the input file, counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(msgspec.Struct, frozen=True):
    """Requests of a batch: all that it has, and those that have been answered and that have failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class TokenUsage(msgspec.Struct, frozen=True):
    """Tokens of all answers of a batch."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def document(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


class BatchRecord(msgspec.Struct, frozen=True):
    """One batch. owner, number: as of a file.

    seconds: of its completion window. output_seconds: after which its output files expire; None: never.
    times: when each status began, Unix time in seconds. end: which status follows FINALIZING.
    output_file_id, error_file_id: names that its results get when it ends; ``results`` says which are there.
    """

    id: str
    owner: str
    number: int
    endpoint: str
    input_file_id: str
    completion_window: str
    seconds: int
    created_at: int
    output_file_id: str
    error_file_id: str
    status: Status = Status.VALIDATING
    end: Status | None = None
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    times: dict[str, int] = {}
    counts: Counts = Counts()
    usage: TokenUsage = TokenUsage()
    model: str | None = None
    faults: tuple[Fault, ...] = ()
    results: tuple[str, ...] = ()

    @property
    def expires_at(self) -> int:
        """When its completion window closes, Unix time in seconds."""
        return self.created_at + self.seconds

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it will change any more."""
        return self.status in ENDED

    def moved(self, status: Status, now: int, **changes: Any) -> BatchRecord:
        """Return the batch in another status, which begins now."""
        times = {**self.times, status.value: now}
        return msgspec.structs.replace(self, status=status, times=times, **changes)

    def document(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        named = {
            "output_file_id": self.output_file_id if self.output_file_id in self.results else None,
            "error_file_id": self.error_file_id if self.error_file_id in self.results else None,
        }
        began = {
            f"{status.value}_at": self.times.get(status.value)
            for status in Status
            if status is not Status.VALIDATING
        }
        faults = [msgspec.to_builtins(fault) for fault in self.faults]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": faults} if faults else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.value,
            **named,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **began,
            "request_counts": msgspec.to_builtins(self.counts),
            "usage": self.usage.document() if self.has_ended else None,
            "metadata": self.metadata,
        }


def new_file_id() -> str:
    """Return an id that nobody can guess."""
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    """Return an id that nobody can guess."""
    return f"batch_{secrets.token_hex(16)}"
