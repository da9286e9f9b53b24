"""Every refusal that llorch makes on purpose.

::

    LlorchError                     exit 1   INTERNAL
    ├── UsageError                  exit 2
    ├── ArtifactError               exit 3   the artifact or checkpoint cannot be used as it is
    │   └── HubError                exit 7   a model hub could not be reached, or refused
    ├── ProviderError               exit 4   the runtime or execution provider is missing or refuses
    ├── PortError                   exit 5   the address cannot be bound
    ├── ResourceError               exit 6   memory or disk is too small; RESOURCE_EXHAUSTED
    ├── WorkerError                 exit 7   a worker could not be reached, or refused
    │   └── UnreachableError        exit 7   no worker answers at the address
    ├── LoggedError                 exit 1   INTERNAL, an error id
    │   └── EngineStoppedError      exit 1   INTERNAL, the same error id for every request it ended
    ├── StageEndedError             exit 1   INTERNAL; the engine stops after it
    ├── LibraryPanicError           exit 1   INTERNAL, an error id
    └── RequestError                         one request is refused; the worker goes on
        ├── InvalidRequestError     exit 2   INVALID_ARGUMENT, with every bad field
        ├── ModelMismatchError      exit 2   FAILED_PRECONDITION
        ├── QueueFullError          exit 6   RESOURCE_EXHAUSTED
        ├── UnavailableError        exit 7   UNAVAILABLE
        │   └── ReplicaLostError    exit 7   UNAVAILABLE, REPLICA_LOST
        ├── UnsupportedError        exit 4   UNIMPLEMENTED
        ├── AuthenticationError     exit 7   UNAUTHENTICATED
        ├── CancelledError          exit 130 CANCELLED
        └── NonFiniteLogitsError    exit 1   INTERNAL

A message says what was found, what was expected and what to do, in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar


class LlorchError(Exception):
    """Base of all errors raised on purpose. ``str(error)`` is one line meant for people."""

    exit_code: ClassVar[int] = 1


class UsageError(LlorchError):
    """The command line or the environment asks for something impossible."""

    exit_code = 2


class ArtifactError(LlorchError):
    """The artifact or checkpoint is missing, damaged, too new, or of a kind that is not supported."""

    exit_code = 3


class NewerSchemaError(ArtifactError):
    """The artifact's manifest has a schema version that this llorch does not know yet."""


class HubError(ArtifactError):
    """A model hub could not be reached, refused, or sent something else than it lists."""

    exit_code = 7


class ProviderError(LlorchError):
    """The inference runtime or the execution provider is missing, ambiguous, or refuses the graph."""

    exit_code = 4


class PortError(LlorchError):
    """The listening address cannot be bound."""

    exit_code = 5


class ResourceError(LlorchError):
    """Memory or disk does not suffice."""

    exit_code = 6


class WorkerError(LlorchError):
    """A remote worker could not be reached, or answered with an error status."""

    exit_code = 7


class UnreachableError(WorkerError):
    """No worker answers at an address; one may again."""


class LoggedError(LlorchError):
    """Something failed that nobody expects to, and has been logged where it did.

    error_id: the words under which the worker's log says what it was.
    """

    def __init__(self, error_id: str) -> None:
        self.error_id = error_id
        super().__init__(f"internal error; the worker's log says more under error id {error_id}")


class EngineStoppedError(LoggedError):
    """The engine of a worker met an error that it does not expect; nothing can be answered after it."""


class StageEndedError(LlorchError):
    """What runs a stage of the model has ended, and with it the keys and values of every sequence there."""


class LibraryPanicError(LlorchError):
    """A library met what its authors hold for impossible; what was asked of it fails, and nothing else."""


class RequestError(LlorchError):
    """One request is refused or ended; the worker and its other requests go on."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request.

    field: path of the field, as in the protobuf message (``sampling.temperature``).
    description: what was found and what is accepted.
    """

    field: str
    description: str


class InvalidRequestError(RequestError):
    """The request's own content is refused. Carries every bad field, not just the first."""

    exit_code = 2

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in self.violations))

    def renamed(self, names: Callable[[str], str]) -> InvalidRequestError:
        """Return the same refusal with other names. names: from a field's name here to that of the caller."""
        return InvalidRequestError([FieldViolation(names(v.field), v.description) for v in self.violations])


def duplicate_id(request_id: str) -> InvalidRequestError:
    """Return the refusal of a request whose id a live one has: of the same front, or of another one's."""
    found = f"{request_id!r} belongs to a live request; choose another or leave it out"
    return InvalidRequestError([FieldViolation("request_id", found)])


class ModelMismatchError(RequestError):
    """The request names a model or fingerprint that this worker does not serve."""

    exit_code = 2


class QueueFullError(RequestError):
    """The waiting queue is full. The request may be sent again after ``retry_after_s`` seconds."""

    exit_code = 6

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class UnavailableError(RequestError):
    """The worker is loading or draining and takes no new requests. reason: one word for programs."""

    exit_code = 7
    reason: ClassVar[str] = "NOT_SERVING"


class ReplicaLostError(UnavailableError):
    """The replica of a cluster that made an answer ended before the answer did."""

    reason = "REPLICA_LOST"


class UnsupportedError(RequestError):
    """The request needs what this worker lacks: a library that is not installed, or something its model
    cannot do.
    """

    exit_code = 4


class AuthenticationError(RequestError):
    """The worker asks for a token that the caller does not show."""

    exit_code = 7


class CancelledError(RequestError):
    """The request was aborted before it was complete."""

    exit_code = 130


class NonFiniteLogitsError(RequestError):
    """The model computed NaN or infinity for this request, from which no token can be chosen."""
