"""A cluster's head, asked before this process joins: whether one is there, and whether it wants a token.

Ray itself would try for a minute where nothing answers, and joins a head that asks nobody for a token.
Input: an address that a person named. Output: the address checked, or a refusal.
"""

from __future__ import annotations

import enum
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from llorch_serve.client.proxy import DIRECT
from llorch_serve.errors import UsageError, WorkerError
from llorch_serve.rpc.security import is_loopback

PROBE_S: Final = 5.0
_ADDRESS: Final = re.compile(
    r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252})):(\d{1,5})", re.ASCII
)
_ALIVE: Final = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_HOW: Final = (
    "start every node with RAY_AUTH_MODE=token and one token (ray get-auth-token --generate makes one), and "
    "set RAY_AUTH_MODE=token with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH here"
)


@dataclass(frozen=True, slots=True)
class HeadAddress:
    """Where a cluster's head listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether nobody but this machine reaches it by this address."""
        return is_loopback(self.host.strip("[]"))


class Answer(enum.Enum):
    """What a head says to somebody who asks whether it is alive."""

    ALIVE = "alive"
    ASKS_TOKEN = "asks for a token"  # noqa: S105 - no secret
    OTHER = "is no head"


def read_head(flag: str, value: str) -> HeadAddress:
    """Return the address that a person named. Raises UsageError for what names none, or leaves it to Ray."""
    match = _ADDRESS.fullmatch(value)
    if match is None or not 0 < int(match[2]) < 2**16:
        raise UsageError(
            f"{flag} is {value[:200]!r}; expected HOST:PORT of the head of a Ray cluster, like "
            "10.0.0.5:6379: a cluster is named, and never looked for"
        )
    return HeadAddress(match[1], int(match[2]))


def find_token(variables: Mapping[str, str], home: Path) -> str | None:
    """Return the token that Ray would show, from where Ray takes it; None where it would show none.

    home: the user's folder. Raises UsageError for a file of a token that cannot be read.
    """
    if variables.get("RAY_AUTH_MODE", "token").lower() != "token":
        return None
    if token := variables.get("RAY_AUTH_TOKEN"):
        return token.strip()
    named = variables.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else home / ".ray" / "auth_token"
    try:
        return path.read_text("utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        if not named:
            return None
        raise UsageError(
            f"RAY_AUTH_TOKEN_PATH names {path}, which cannot be read ({error}); check it"
        ) from error


def check_head(head: HeadAddress, token: str | None, note: Callable[[str], None]) -> None:
    """Raise WorkerError unless a Ray head answers there and takes the token, UsageError where it must ask for
    one and does not.

    note: told what a person should know of a head that is used all the same.
    """
    if not head.is_loopback and token is None:
        raise UsageError(f"{head} is beyond this machine's loopback, and there is no token for it; {_HOW}")
    _check_listens(head)
    if _uses_tls():
        return  # it asks for a certificate, which Ray shows
    stranger = _ask(head, None)
    if stranger is Answer.ASKS_TOKEN:
        if token is None:
            raise UsageError(f"the cluster at {head} asks for a token, and there is none; {_HOW}")
        if _ask(head, token) is not Answer.ALIVE:
            raise WorkerError(
                f"the cluster at {head} refuses the token that is set here; set the cluster's own"
            )
        return
    if stranger is Answer.OTHER:
        raise WorkerError(
            f"what listens at {head} is no head of a Ray cluster; expected the port of its GCS, 6379"
        )
    open_to_all = f"the cluster at {head} asks callers for no token: whoever reaches it can run code there"
    if not head.is_loopback:
        raise UsageError(f"{open_to_all}; {_HOW}")
    note(f"{open_to_all}, from other machines too, as Ray listens on every address; {_HOW}")


def is_alive(head: HeadAddress) -> bool:
    """Tell whether a head answers there, were it only to refuse. Takes seconds where none does."""
    try:
        _check_listens(head)
    except WorkerError:
        return False
    return _uses_tls() or _ask(head, find_token(os.environ, Path.home())) is not Answer.OTHER


def _uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0") not in ("", "0")


def _check_listens(head: HeadAddress) -> None:
    try:
        socket.create_connection((head.host.strip("[]"), head.port), PROBE_S).close()
    except OSError as error:
        raise WorkerError(
            f"no cluster answers at {head} ({error.strerror or error}); start one with: ray start --head "
            f"--port {head.port}, or name the address of one that runs"
        ) from error


def _ask(head: HeadAddress, token: str | None) -> Answer:
    """Ask the head whether it is alive, as somebody with that token, or with none."""
    shown = () if token is None else (("authorization", f"Bearer {token}"),)
    with grpc.insecure_channel(str(head), [DIRECT]) as channel:
        alive = channel.unary_unary(_ALIVE, request_serializer=bytes, response_deserializer=bytes)
        try:
            alive(b"", timeout=PROBE_S, metadata=shown)
        except grpc.RpcError as error:
            refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
            return Answer.ASKS_TOKEN if refused else Answer.OTHER
    return Answer.ALIVE
