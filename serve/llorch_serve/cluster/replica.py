"""One replica: a whole worker whose requests and answers are bytes.

Input: requests of fronts, see ``wire_requests.py``, on the event loop that Ray calls it on. Output: the parts
of their answers. Admission, refusal and aborting are the front desk's, as for every other way to a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from llorch_serve.calls.front_desk import FrontDesk, MessageCalls
from llorch_serve.calls.interfaces import ClosableGenerator
from llorch_serve.calls.live_call import LiveCall
from llorch_serve.calls.long_answers import places_of, written
from llorch_serve.cluster import wire, wire_requests
from llorch_serve.cluster.interfaces import (
    MAX_PENDING_BYTES,
    CallKind,
    Description,
    ReplicaLoad,
    RoutingHint,
)
from llorch_serve.cluster.memory import ProcessMemory
from llorch_serve.errors import EngineStoppedError, ModelMismatchError, UnavailableError
from llorch_serve.requests import Abort, UpdateSink

_LOADING: Final = "the replica is loading its model; try another"

_ENDING_S: Final = 1.0  # for the loop to tell those who wait
_ENDING: Final = "the replica has been told to end; try another"


class ServedReplica:
    """A worker behind bytes. All methods but the first belong to one event loop.

    name: what fronts call it. description: what it says of itself; its ``info`` is the worker's.
    stream_interval: see :class:`llorch_serve.calls.live.LiveCalls`.
    """

    def __init__(
        self,
        worker: ClosableGenerator,
        description: Description,
        *,
        name: str,
        stream_interval: int | None = None,
    ) -> None:
        self.name = name
        self._worker = worker
        self.description = description
        self._stream_interval = stream_interval
        self._desk: FrontDesk | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # the loop's
        # Names by which requests run here, by the caller and the id that the caller knows: fronts know
        # nothing of each other's ids.
        self._running: dict[tuple[str, str], set[str]] = {}
        self._count = itertools.count()
        self._failure: EngineStoppedError | None = None
        self._memory = ProcessMemory(time.monotonic)
        worker.when_dead(self._died)

    async def call(self, kind: CallKind, raw: bytes, hint: RoutingHint) -> AsyncGenerator[bytes, None]:
        """Answer a request; give the parts of its answer as they come, an error as the last one.

        Closing the generator, or cancelling it, ends the request.
        """
        desk = self._opened()
        with desk.call(), self._named(hint) as name:
            try:
                self._check(hint)
                size, submit = len(raw), functools.partial(self._submit, kind, raw, name)
                del raw  # it would be kept for as long as the answer takes
                async with desk.admit(size, "", submit) as call:
                    del submit
                    ended = False
                    while not ended:
                        updates = await call.take()
                        ended = updates[-1].is_last
                        write = functools.partial(wire.write_updates, updates)
                        yield await written(places_of(updates), write)
            except Exception as error:  # noqa: BLE001 - the boundary: every error crosses as a status
                yield wire.write_failure(error, method=kind)

    @contextlib.contextmanager
    def _named(self, hint: RoutingHint) -> Iterator[str]:
        """Give a name that no other request here has, for as long as this one runs: its id, if that is
        free.
        """
        key, name = (hint.owner, hint.request_id), hint.request_id
        while self._opened().is_live(name) or any(name in names for names in self._running.values()):
            name = f"{hint.request_id}~{next(self._count)}"
        self._running.setdefault(key, set()).add(name)
        try:
            yield name
        finally:
            self._running[key].remove(name)
            if not self._running[key]:
                del self._running[key]

    async def abort(self, request_ids: Sequence[str], owner: str) -> tuple[str, ...]:
        """End a caller's live requests; return the ids of those that were live here."""
        desk = self._opened()
        found = [id_ for id_ in dict.fromkeys(request_ids) if (owner, id_) in self._running]
        return tuple(id_ for id_ in found if desk.cancel(self._running[owner, id_], ""))

    async def describe(self, _hint: RoutingHint | None = None) -> bytes:
        """Return what this replica says of itself, see :func:`llorch_serve.cluster.wire.read_description`.
        The hint is for the router.
        """
        return wire.write_description(self.description)

    async def load(self) -> bytes:
        """Return how busy it is, see :func:`llorch_serve.cluster.wire.read_load`."""
        return wire.write_load(
            ReplicaLoad(
                self.name,
                self.description.info.fingerprint,
                self._worker.load(),
                self._memory.resident_bytes(),
                self._memory.device_bytes(),
                self.description.info.capabilities,
            )
        )

    def check_health(self) -> None:
        """Raise UnavailableError once the engine has stopped: only a new replica will answer."""
        if self._failure is not None:
            raise UnavailableError(f"the engine has stopped; {self._failure}")

    def close(self) -> None:
        """End what still runs, as a lost replica's, and free the model. Any thread; blocks."""
        self._end_calls()
        self._worker.close()
        if self._desk is not None:
            self._desk.close()

    def _end_calls(self) -> None:
        """End what still runs before its worker ends it as if a caller had aborted it."""
        loop, desk, done = self._loop, self._desk, threading.Event()
        if loop is None or desk is None:
            return

        def end() -> None:
            desk.end_all(UnavailableError(_ENDING))
            done.set()

        if threading.get_ident() == self._thread:
            end()
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end)
            done.wait(_ENDING_S)

    def _died(self, error: EngineStoppedError) -> None:
        self._failure = error

    def _opened(self) -> FrontDesk:
        """Return the front desk, made on the loop that the first call comes on."""
        if self._desk is None:
            self._desk = FrontDesk(
                "llorch-replica",
                _LOADING,
                max_pending_bytes=MAX_PENDING_BYTES,
                stream_interval=self._stream_interval,
            )
            self._desk.open(self._worker)
            self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        return self._desk

    def _check(self, hint: RoutingHint) -> None:
        """Raise ModelMismatchError for a request that is another model's: its tokens are."""
        served = self.description.info.fingerprint
        if hint.fingerprint not in ("", served):
            raise ModelMismatchError(
                f"fingerprint {hint.fingerprint!r} was asked for, this replica serves {served!r}"
            )

    def _submit(self, kind: CallKind, raw: bytes, name: str, calls: MessageCalls) -> LiveCall:
        """Read a request and submit it under a name. A reading thread."""
        worker = self._worker
        submit: Callable[[UpdateSink], Abort]
        match kind:
            case "generate":
                text = replace(wire_requests.read_generation(raw), request_id=name)
                submit = functools.partial(worker.submit, text)
            case "score":
                scored = replace(wire_requests.read_score(raw), request_id=name)
                submit = functools.partial(worker.submit_score, scored)
            case "rank":
                ranked = replace(wire_requests.read_rank(raw), request_id=name)
                submit = functools.partial(worker.submit_rank, ranked)
            case "embed":
                embedded = replace(wire_requests.read_embed(raw), request_id=name)
                submit = functools.partial(worker.submit_embedding, embedded)
        return calls.submit(name, submit, whole=kind != "generate")
