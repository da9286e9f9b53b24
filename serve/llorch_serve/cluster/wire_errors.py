"""Errors between a front and its replicas: google.rpc.Status as bytes, and the same errors again.

To callers a status has less: ``rpc/status.py`` writes that one, of what comes out here.
"""

from __future__ import annotations

import logging
import secrets
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from llorch_serve.errors import (
    AuthenticationError,
    CancelledError,
    EngineStoppedError,
    FieldViolation,
    InvalidRequestError,
    LibraryPanicError,
    LlorchError,
    LoggedError,
    ModelMismatchError,
    NonFiniteLogitsError,
    ProviderError,
    QueueFullError,
    ReplicaLostError,
    ResourceError,
    UnavailableError,
    UnsupportedError,
    WorkerError,
)

_DOMAIN: Final = "llorch.cluster"
_ERROR_ID: Final = "error_id"
_CODES: Final[dict[type[LlorchError], grpc.StatusCode]] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    ModelMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    ReplicaLostError: grpc.StatusCode.UNAVAILABLE,
    UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
    AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    CancelledError: grpc.StatusCode.CANCELLED,
    NonFiniteLogitsError: grpc.StatusCode.INTERNAL,
    ResourceError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ProviderError: grpc.StatusCode.INTERNAL,
    LibraryPanicError: grpc.StatusCode.INTERNAL,
    EngineStoppedError: grpc.StatusCode.INTERNAL,
    LoggedError: grpc.StatusCode.INTERNAL,
}
_BY_NAME: Final = {kind.__name__: kind for kind in _CODES}

logger = logging.getLogger(__name__)


def write_error(error: Exception, *, method: str) -> bytes:
    """Return the status of an error. One that is not ours is logged, and its id is told alone."""
    code = _CODES.get(type(error)) if isinstance(error, LlorchError) else None
    if code is None:
        error_id = secrets.token_hex(4)
        logger.error("%s failed, error id %s", method, error_id, exc_info=error)
        return write_error(LoggedError(error_id), method=method)
    status = status_pb2.Status(code=code.value[0], message=_utf8(str(error)))
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=_DOMAIN)
    match error:
        case InvalidRequestError():
            bad = error_details_pb2.BadRequest()
            for violation in error.violations:
                bad.field_violations.add(
                    field=_utf8(violation.field), description=_utf8(violation.description)
                )
            status.details.append(_packed(bad))
        case QueueFullError():
            delay = Duration()
            delay.FromNanoseconds(int(error.retry_after_s * 1e9))
            status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
        case LoggedError():
            info.metadata[_ERROR_ID] = error.error_id
    status.details.append(_packed(info))
    raw: bytes = status.SerializeToString()
    return raw


def read_error(raw: bytes) -> LlorchError:
    """Return the error of a status; WorkerError for one that this version does not know."""
    info, bad, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    try:
        status = status_pb2.Status.FromString(raw)
        for detail in status.details:
            for message in (info, bad, retry):
                detail.Unpack(message)
    except DecodeError:
        return WorkerError("a replica told of an error in no form that this version knows; update llorch")
    kind = _BY_NAME.get(info.reason) if info.domain == _DOMAIN else None
    if kind is InvalidRequestError:
        return InvalidRequestError([FieldViolation(v.field, v.description) for v in bad.field_violations])
    if kind is QueueFullError:
        return QueueFullError(status.message, retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9)
    if kind is not None and issubclass(kind, LoggedError):
        return kind(info.metadata[_ERROR_ID])
    return (kind or WorkerError)(status.message)


def _packed(message: Message) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
