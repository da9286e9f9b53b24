"""Errors of ours to gRPC statuses and back: the table of the worker's contract, both directions in one place.

The servicer calls :func:`write_status` with what a request ended with; the client calls :func:`read_status`
with what gRPC raised. Between them travel a code, one line of text and google.rpc details: BadRequest with
each bad field, RetryInfo where the queue or the memory is full, ErrorInfo where the worker itself (and not
the network or a proxy) is unavailable, out of memory, or lacks what was asked for.
"""

from __future__ import annotations

import logging
import secrets
from typing import Final, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from llorch_serve.errors import (
    AuthenticationError,
    CancelledError,
    FieldViolation,
    InvalidRequestError,
    LlorchError,
    LoggedError,
    ModelMismatchError,
    NonFiniteLogitsError,
    QueueFullError,
    ReplicaLostError,
    ResourceError,
    UnavailableError,
    UnreachableError,
    UnsupportedError,
    WorkerError,
)

MAX_STATUS_BYTES: Final = 3000
"""Most bytes of a status message; in the base64 of a trailer they stay under 4 KB."""

_MAX_TEXT_BYTES: Final = 800  # of the status' one line, which travels a second time as grpc-message
_MAX_VIOLATION_BYTES: Final = 400
_DETAILS_KEY: Final = "grpc-status-details-bin"
_DOMAIN: Final = "llorch"
_MEMORY_RETRY_S: Final = 1.0  # by then requests that run may have ended and left their memory to others

_CODES: Final[dict[type[LlorchError], grpc.StatusCode]] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    ModelMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
    AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    CancelledError: grpc.StatusCode.CANCELLED,
    NonFiniteLogitsError: grpc.StatusCode.INTERNAL,
}

_PLAIN: Final[dict[grpc.StatusCode, type[LlorchError]]] = {
    grpc.StatusCode.FAILED_PRECONDITION: ModelMismatchError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.CANCELLED: CancelledError,
}
"""Codes that mean one error, whoever says them."""

M = TypeVar("M", bound=Message)

logger = logging.getLogger(__name__)


def write_status(
    error: Exception, *, method: str
) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Return code, text and trailing metadata for an error.

    Anything but a request's own error and want of memory is a bug here: it is logged with a traceback and an
    error id, and the caller learns the id only.
    """
    if isinstance(error, LoggedError):  # once, where it happened
        return grpc.StatusCode.INTERNAL, str(error), ()
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)
    if code is None:
        error_id = secrets.token_hex(4)
        logger.error("%s failed, error id %s", method, error_id, exc_info=error)
        if isinstance(error, ResourceError):
            return _out_of_memory(error_id)
        return (
            grpc.StatusCode.INTERNAL,
            f"internal error; the worker's log says more under error id {error_id}",
            (),
        )
    text = _cut(str(error), _MAX_TEXT_BYTES)
    status = status_pb2.Status(code=code.value[0], message=text)
    match error:
        case InvalidRequestError():
            status.details.append(_pack(_bad_request(error, MAX_STATUS_BYTES - status.ByteSize())))
        case QueueFullError():
            status.details.append(_retry_after(error.retry_after_s))
        case NonFiniteLogitsError():  # the artifact's fault: whoever runs the worker should know too
            logger.error("%s: %s", method, text)
        case UnavailableError():
            status.details.append(_pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=_DOMAIN)))
        case UnsupportedError():
            status.details.append(_pack(error_details_pb2.ErrorInfo(reason="UNSUPPORTED", domain=_DOMAIN)))
    return code, text, ((_DETAILS_KEY, status.SerializeToString()),)


def _out_of_memory(error_id: str) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Return what a caller learns: to try again. What to change is for whoever runs the worker, so the log
    has it.
    """
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    text = f"the worker's memory is full; try again later. Its log says more under error id {error_id}"
    status = status_pb2.Status(code=code.value[0], message=text)
    status.details.append(_retry_after(_MEMORY_RETRY_S))
    status.details.append(_pack(error_details_pb2.ErrorInfo(reason="OUT_OF_MEMORY", domain=_DOMAIN)))
    return code, text, ((_DETAILS_KEY, status.SerializeToString()),)


def _retry_after(seconds: float) -> any_pb2.Any:
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(int(seconds * 1e9))
    return _pack(error_details_pb2.RetryInfo(retry_delay=delay))


def _bad_request(error: InvalidRequestError, room: int) -> error_details_pb2.BadRequest:
    """Return as many violations as fit into ``room`` bytes, then one that counts those left out."""
    room -= 150  # the Any around it, and the counting violation
    message = error_details_pb2.BadRequest()
    for index, violation in enumerate(error.violations):
        entry = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(violation.field, _MAX_VIOLATION_BYTES),
            description=_cut(violation.description, _MAX_VIOLATION_BYTES),
        )
        room -= entry.ByteSize() + 4
        if room < 0:
            left_out = len(error.violations) - index
            message.field_violations.add(
                field="others", description=f"{left_out} more bad fields are not listed here"
            )
            break
        message.field_violations.append(entry)
    return message


def _cut(text: str, limit: int) -> str:
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return data.decode()
    mark = "..."
    return data[: limit - len(mark)].decode("utf-8", "ignore") + mark


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def read_status(error: grpc.RpcError, *, address: str) -> LlorchError:
    """Return the error of ours that a failed call stands for; ``address`` names the worker in its text."""
    code, text = error.code(), error.details() or ""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        fields = [v for bad in _details(error, error_details_pb2.BadRequest) for v in bad.field_violations]
        return InvalidRequestError(
            [FieldViolation(v.field, v.description) for v in fields] or [FieldViolation("request", text)]
        )
    if (plain := _PLAIN.get(code)) is not None:
        return plain(text)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if _is_ours(error):
            return ResourceError(text)
        for retry in _details(error, error_details_pb2.RetryInfo):
            return QueueFullError(text, retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9)
    if code is grpc.StatusCode.UNIMPLEMENTED and _is_ours(error):
        return UnsupportedError(text)
    if code is grpc.StatusCode.UNAVAILABLE:
        if ReplicaLostError.reason in (info.reason for info in _infos(error)):
            return ReplicaLostError(text)
        if _is_ours(error):
            return UnavailableError(text)
        return UnreachableError(
            f"no worker answers at {address} ({text}); start one with: llorch serve DIR, or correct the "
            f"address"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return WorkerError(
            f"the worker at {address} did not finish in time; allow more time or ask for fewer tokens"
        )
    return WorkerError(f"the worker at {address} answered {code.name}: {text}")


def _is_ours(error: grpc.RpcError) -> bool:
    """Tell whether a worker said it, and not a proxy, or a worker that lacks the method."""
    return bool(_infos(error))


def _infos(error: grpc.RpcError) -> list[error_details_pb2.ErrorInfo]:
    """Return what a worker itself says of its reasons."""
    return [info for info in _details(error, error_details_pb2.ErrorInfo) if info.domain == _DOMAIN]


def _details(error: grpc.RpcError, kind: type[M]) -> list[M]:
    """Return the rich details of one kind; none if the status has none, or none that make sense."""
    found: list[M] = []
    try:
        status = rpc_status.from_call(error)
        for packed in status.details if status is not None else ():
            message = kind()
            if packed.Unpack(message):
                found.append(message)
    except (
        ValueError,
        DecodeError,
    ):  # not ours: a proxy wrote over code or text, or the bytes are no details
        return []
    return found
