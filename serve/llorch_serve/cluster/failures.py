"""What went wrong between a front and a replica, in our words: Ray's never reach a caller.

Input: what a call of a replica raised. Output: what the caller is told if it ends there, and whether another
replica may answer. Ray's errors are known by their names, so that nothing of Ray is imported here.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from dataclasses import dataclass
from typing import Final

from llorch_serve.errors import (
    EngineStoppedError,
    LlorchError,
    LoggedError,
    ModelMismatchError,
    QueueFullError,
    ReplicaLostError,
    UnavailableError,
)

MOST_TRIES: Final = 2
"""Of a request elsewhere, after the first replica that failed it."""

_RETRY_S: Final = 1.0  # by then slots may be free, or a new replica has begun
_LOST: Final = frozenset(
    {
        "RayActorError",  # ActorDiedError and ActorUnavailableError are that too
        "NodeDiedError",
        "WorkerCrashedError",
        "ObjectLostError",
        "OutOfMemoryError",  # of a node, where Ray ends what takes most
        "LocalRayletDiedError",
        "RayChannelError",
        "RpcError",  # Ray's
        "ActorHandleNotFoundError",
        "ReplicaUnavailableError",
        "TaskCancelledError",  # Ray ends the calls of a replica that it stops
        "RequestCancelledError",
    }
)
_CUT: Final = frozenset({"UNAVAILABLE", "CANCELLED", "INTERNAL"})
"""Statuses of gRPC's own when a connection or a server ends. What a call is refused with is none of them."""
_ENDED: Final = re.compile(r"Unexpected error \((?:StatusCode\.)?(\w+)\)")
"""Serve's words for a call that ended, with a status or None, and nobody knows whether it was taken."""
_CUT_EARLY: Final = _CUT | {"OK", "None", "DEADLINE_EXCEEDED"}
"""With what such a call ends where the replica, or the way there, is gone."""
_FULL: Final = frozenset({"BackPressureError", "PendingCallsLimitExceeded"})
_ABSENT: Final = frozenset({"DeploymentUnavailableError"})

logger = logging.getLogger(__name__)


class AnswerCutError(Exception):
    """A replica's answer ended without its last part."""


@dataclass(frozen=True, slots=True)
class Failure:
    """error: what the caller is told if nothing else answers. elsewhere: whether another replica may."""

    error: LlorchError
    elsewhere: bool = False


def is_lost(error: BaseException) -> bool:
    """Tell whether Ray says by this that a replica, or the way there, is gone."""
    if any(kind.__name__ == "AioRpcError" for kind in type(error).__mro__):
        code = getattr(error, "code", None)
        return callable(code) and getattr(code(), "name", "") in _CUT
    if type(error) is RuntimeError and (ended := _ENDED.match(str(error))) is not None:
        return ended[1] in _CUT_EARLY
    return any(kind.__name__ in _LOST for kind in type(error).__mro__)


def judge(error: BaseException, *, begun: bool) -> Failure:
    """Return what a failure is. begun: the caller has been told a part of the answer."""
    if isinstance(error, (EngineStoppedError, ModelMismatchError, UnavailableError)):
        return _lost(begun)  # the replica says so itself: it ends, or is replaced
    if isinstance(error, LlorchError):
        return Failure(error)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & _FULL:
        full = "every replica has as many requests as it takes; try again"
        return Failure(QueueFullError(full, retry_after_s=_RETRY_S))
    if kinds & _ABSENT:
        return Failure(UnavailableError("no replica runs; try again"))
    gone = (AnswerCutError, asyncio.CancelledError, ConnectionError, TimeoutError)
    if is_lost(error) or isinstance(error, gone):
        logger.warning("a replica was lost: %s", type(error).__name__)
        return _lost(begun)
    error_id = secrets.token_hex(4)
    logger.error("a call of a replica failed, error id %s", error_id, exc_info=error)
    return Failure(LoggedError(error_id))


def _lost(begun: bool) -> Failure:
    if begun:
        lost = "the replica that made this answer has ended before it did; send the request again"
        return Failure(ReplicaLostError(lost), elsewhere=True)
    none = "the replicas that were asked have ended, or serve another model, and none answered; try again"
    return Failure(UnavailableError(none), elsewhere=True)
