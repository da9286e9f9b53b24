"""What a front asks of the replicas behind it, as protocols and plain data.

``routed_generator.py`` is written against :class:`Replicas`; ``handles.py`` implements it over Ray, and the
tests over workers in their own process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

from llorch_serve.cluster.prefix_index import Prefix
from llorch_serve.config import CacheSharing
from llorch_serve.engine.load import Load
from llorch_serve.requests import ModelInfo

MAX_PENDING_BYTES: Final = 256 * 2**20
"""Of requests that wait to be read in a replica, and of one of them."""

CallKind: TypeAlias = Literal["generate", "score", "rank", "embed"]

Probe: TypeAlias = Callable[[], Awaitable[object]]
"""Returns once a replica has said that it is there; raises Ray's error where Ray knows that it is not."""


@dataclass(frozen=True, slots=True)
class RoutingHint:
    """What goes with a request beside its bytes: what a choice among replicas may look at, and its names.

    request_id, owner: the request's, so that any front can end it.
    prefix: the prompt, where a replica may hold its beginning. Replicas have no use for it, so it does not
        leave the process; nor do ``on_sent``, ``on_taken`` and ``is_over``.
    fingerprint: of the model that must answer; empty: any.
    session: whose conversation it is, for ties; None: nobody's. Every front chooses alike for a session.
    avoid: replicas that have just failed this request.
    on_sent: told the name of the replica that a request is sent to, on the thread that chooses it, and how to
        ask that replica whether it is there. One that is full refuses, and the request is sent elsewhere.
    on_taken: told the name of the replica that has taken it.
    is_over: tells whether its answer has come to its end.
    """

    request_id: str
    owner: str = ""
    prefix: Prefix | None = None
    fingerprint: str = ""
    session: str | None = None
    avoid: frozenset[str] = frozenset()
    on_sent: Callable[[str, Probe], None] | None = None
    on_taken: Callable[[str], None] | None = None
    is_over: Callable[[], bool] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RoutingHint, (
            self.request_id,
            self.owner,
            None,
            self.fingerprint,
            self.session,
            self.avoid,
        )


@dataclass(frozen=True, slots=True)
class Description:
    """What a replica says of itself, so that a front refuses what the replica would.

    info: the model, as one replica serves it.
    most_waiting: sequences of one request that its queue can hold.
    tool_format, reasoning_format, rank_format, cache_sharing: see :class:`llorch_serve.config.EngineConfig`.
    """

    info: ModelInfo
    most_waiting: int = 1024
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    rank_format: str = "auto"
    cache_sharing: CacheSharing = CacheSharing.CALLER


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """How busy one replica is.

    replica: its name. fingerprint: of its model.
    memory_bytes: resident memory of its process. device_memory_bytes: what that holds of GPUs; None: not
        known, or nothing.
    capabilities: see :class:`llorch_serve.requests.ModelInfo`.
    """

    replica: str
    fingerprint: str
    load: Load
    memory_bytes: int = 0
    device_memory_bytes: int | None = None
    capabilities: tuple[str, ...] = ()


class Replicas(Protocol):
    """The replicas of one model. Used on one event loop."""

    def call(self, kind: CallKind, raw: bytes, *, hint: RoutingHint) -> AsyncGenerator[bytes, None]:
        """Have one replica answer a request; give its answer's parts as they come, see ``wire.py``.

        Closing the iterator ends the request. Raises what ``failures.py`` tells apart.
        """

    async def describe(self) -> Description:
        """Return what a replica says of itself, once one is there."""

    async def loads(self) -> Sequence[ReplicaLoad]:
        """Return how busy each replica is that runs."""

    async def abort(self, request_ids: Sequence[str], owner: str) -> tuple[str, ...]:
        """End a caller's live requests, whatever front they came by; return the ids of those that were
        live.
        """

    async def close(self) -> None:
        """Let go of the replicas, which go on."""
