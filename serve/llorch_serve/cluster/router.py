"""Asks ``choice.py`` where Ray sends a request.

Ray Serve makes one of these for each handle of a deployment, in the front's process, and pickles the class by
value: what it needs is imported from other modules, and nothing but Ray imports this one, by
:data:`ROUTER`'s path. Its base class is alpha; what it relies upon is tried by
``tests/e2e/test_cluster_router.py``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from llorch_serve.cluster.choice import Candidate, Rules, choose
from llorch_serve.cluster.in_flight import InFlight
from llorch_serve.cluster.interfaces import RoutingHint
from llorch_serve.cluster.prefix_index import PrefixIndex
from llorch_serve.cluster.unreachable import Unreachable

if TYPE_CHECKING:
    from ray.serve._private.common import RunningReplicaInfo

_ANSWER_S: Final = 0.5
_ANYWHERE: Final = RoutingHint("")
AVOID_S: Final = 15.0
"""How long a request waits for a replica that has not failed it: a new one starts in some six seconds."""


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that probably holds most of its prompt; see ``choice.py``.

    A replica tells its slots and the fingerprint of its model by ``record_replica_metadata``.
    """

    # Ray asks a replica that it has not heard of for some time how many requests it has, and goes to another
    # if it does not say within 0.1 s. A core that computes a prompt may take longer, and then holds it.
    queue_len_response_deadline_s = _ANSWER_S

    def initialize_state(self, **rules: Any) -> None:
        """Begin. rules: the fields of :class:`llorch_serve.cluster.choice.Rules`."""
        self._rules = Rules(**rules)
        self._index = PrefixIndex()
        self._told: dict[ReplicaID, tuple[str, int, str]] = {}  # name, slots and fingerprint
        self._unreachable = Unreachable(time.monotonic)
        self._in_flight = InFlight(time.monotonic)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica for a request and one to ask in its place, each alone; nothing if all are full.

        Ray asks again after a pause then.
        """
        hint = _hint_of(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # or Ray asks again without a pause
            if time.time() - pending_request.created_at > AVOID_S:
                hint = replace(hint, avoid=frozenset())
        unsent, sent = self._in_flight.unsent(), self._in_flight.on_the_way()
        candidates = [
            self._candidate(one, unsent, sent)
            for one in candidate_replicas
            if one.replica_id.unique_id not in self._unreachable
        ]
        chosen = choose(candidates, hint, self._index, self._rules)
        if chosen and pending_request is not None:
            self._in_flight.chosen(chosen[0], pending_request.metadata.internal_request_id)
            if hint.prefix is not None:
                # Before it has got there, so that others of its kind that come at once go there too.
                self._index.sent(chosen[0], hint.prefix)
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas} if chosen else {}
        return [[by_name[name]] for name in chosen]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take note of the replicas that there are now, and of what each has told."""
        self._told = {
            one.replica_id: (
                one.replica_id.unique_id,
                _slots_of(one),
                str(one.replica_metadata.get("fingerprint", "")),
            )
            for one in replicas
        }
        slots = {name: count for name, count, _ in self._told.values()}
        self._index.keep(slots)
        self._in_flight.keep(slots)
        self._unreachable.keep(slots)
        super().update_replicas(replicas)

    def create_replica_wrapper(self, replica_info: RunningReplicaInfo) -> RunningReplica:
        """Return a replica that says what is sent to it."""
        return _Replica(replica_info, self)

    def sending(self, replica: _Replica, request: PendingRequest) -> None:
        """Take note of a request that is about to be sent to a replica."""
        name, hint = replica.replica_id.unique_id, _hint_of(request)
        if hint is not _ANYWHERE:  # what all replicas are asked was chosen for none
            self._in_flight.sent(name, request.metadata.internal_request_id)
        if hint.on_sent is not None:
            hint.on_sent(name, replica.is_there)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Leave a replica that could not be reached out for a while."""
        super().on_replica_actor_unavailable(replica_id)
        self._unreachable.failed(replica_id.unique_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Take note that a replica has answered, be it that it is full."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._unreachable.reached(replica_id.unique_id)

    def answered(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Take note that a replica that was asked has answered, if it is still one."""
        if replica_id in self._told:
            self.on_new_queue_len_info(replica_id, num_ongoing_requests)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Take note of the replica that has really taken a request."""
        hint = _hint_of(pending_request)
        request_id = pending_request.metadata.internal_request_id
        self._in_flight.taken(replica_id.unique_id, request_id, hint.is_over)
        if hint.prefix is not None:
            self._index.sent(replica_id.unique_id, hint.prefix)
        if hint.on_taken is not None:
            hint.on_taken(replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Take note that a replica has a request no longer."""
        self._in_flight.ended(replica_id.unique_id, internal_request_id)

    def _candidate(
        self, replica: RunningReplica, unsent: Mapping[str, int], sent: Mapping[str, int]
    ) -> Candidate:
        name, slots, fingerprint = self._told[replica.replica_id]
        known = self.replica_queue_len_cache.get(replica.replica_id)  # None: not asked for some time
        mine = self._in_flight.count(name) + sent.get(name, 0)
        ongoing = max(known or 0, mine) - self._in_flight.over(name) + unsent.get(name, 0)
        return Candidate(name, ongoing, slots, replica.max_ongoing_requests, fingerprint)


class _Replica(RunningReplica):
    """A replica that tells its router what is sent to it. Calls of its own keep it, and its connection."""

    def __init__(self, replica_info: RunningReplicaInfo, router: PrefixRouter) -> None:
        super().__init__(replica_info)
        self._router = router
        self._loop = asyncio.get_running_loop()

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> Any:
        self._router.sending(self, pr)
        return super().try_send_request(pr, with_rejection)

    async def is_there(self) -> None:
        """Return once the replica has answered; raise Ray's error where it has ended or cannot be reached.
        The router is told of either. Any loop.
        """
        tell = self._loop.call_soon_threadsafe
        try:
            count = await self.get_queue_len(deadline_s=_ANSWER_S)
        except ActorDiedError:
            tell(self._router.on_replica_actor_died, self.replica_id)
            raise
        except ActorUnavailableError:
            tell(self._router.on_replica_actor_unavailable, self.replica_id)
            raise
        tell(self._router.answered, self.replica_id, count)


def _hint_of(request: PendingRequest | None) -> RoutingHint:
    given: Iterable[Any] = () if request is None else (*request.args, *request.kwargs.values())
    return next((each for each in given if isinstance(each, RoutingHint)), _ANYWHERE)


def _slots_of(replica: RunningReplica) -> int:
    """Return a replica's slots: it takes twice as many requests, if it does not say."""
    return int(replica.replica_metadata.get("slots", 0)) or max(1, replica.max_ongoing_requests // 2)
