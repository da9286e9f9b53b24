"""What becomes of batches: each is checked, run in its turn, and ended, whatever happens meanwhile.

Input: batches of the store, and the work on one of them. Output: their statuses, and files of results. One
batch of a caller is checked and one runs at a time, and those of a few callers run beside each other. What a
restart finds goes on where it was. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

import msgspec

from llorch_serve.batch.answering import BatchStoppedError
from llorch_serve.errors import LlorchError, ResourceError
from llorch_serve.http.batches.records import ENDED, BatchRecord, Counts, Fault, Status
from llorch_serve.http.batches.store import Store
from llorch_serve.http.problems import HttpError

MOST_RUNNING: Final = 4
"""Callers whose batches run beside each other."""
LOOK_S: Final = 1.0
"""How often it is looked how much room results take, and whether a batch has expired that waits."""

RETRY_S: Final = 60.0
"""After which a batch is tried again that the disk, or want of a worker, has broken off."""

_PASSING: Final = (OSError, ResourceError, BatchStoppedError)
"""Errors that another try may mend."""
_ENDED_FROM: Final = frozenset({Status.IN_PROGRESS, Status.FINALIZING})
_CANCELLED_FROM: Final = frozenset({Status.CANCELLING, Status.FINALIZING})

T = TypeVar("T")

logger = logging.getLogger(__name__)


class BatchFaultError(LlorchError):
    """A batch cannot be run. faults: why."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.faults = faults
        super().__init__("; ".join(fault.message for fault in faults))


class Work(Protocol):
    """What is done for one batch."""

    def check(self, batch: BatchRecord, stopping: threading.Event) -> int:
        """Return how many requests its input has. Blocks, at most until ``stopping`` is set.

        Raises BatchFaultError, OSError.
        """

    async def run(self, batch: BatchRecord, tell: Callable[[Counts], None]) -> None:
        """Answer what is left to answer; cancelled, it keeps what it has.

        Raises BatchFaultError, and BatchStoppedError, ResourceError or OSError where it can go on later.
        """

    def size(self, batch: BatchRecord) -> int:
        """Return how many bytes its results take. Blocks."""

    def end(self, batch: BatchRecord, stopping: threading.Event) -> dict[str, Any]:
        """Make files of its results, and return what of its record that changes. Blocks, and makes no more
        of them once ``stopping`` is set.

        Raises OSError.
        """


class Blocking(Protocol):
    """Runs a function on a thread, and waits for its end even where it is cancelled itself."""

    async def __call__(self, work: Callable[[], T], hurry: Callable[[], None] = ...) -> T:
        """Return what the function does. hurry: has it end soon, where nobody waits for it any more."""


class BatchRunner:
    """:meth:`start` begins, :meth:`stop` ends."""

    def __init__(self, store: Store, work: Work, blocking: Blocking) -> None:
        self._store = store
        self._work = work
        self._blocking = blocking
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by batch
        self._owners: dict[str, str] = {}  # of batches that run
        self._checked: dict[str, str] = {}  # owners of batches that are checked, or wait for it
        self._served: dict[str, int] = {}  # by owner, which one it was of the batches that have begun to run
        self._begun = itertools.count(1)
        self._cancelled: set[str] = set()  # batches whose tasks have been told
        self._progress: dict[str, Counts] = {}
        self._changed = asyncio.Event()
        self._checking = asyncio.Lock()
        self._leading: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, with what an earlier worker has left too."""
        self._leading = asyncio.ensure_future(self._lead())

    def look(self) -> None:
        """Look for batches that have come or that are to be cancelled."""
        self._changed.set()

    def now(self, batch: BatchRecord) -> BatchRecord:
        """Return a batch with the requests that are done by now."""
        counts = self._progress.get(batch.id)
        return batch if counts is None or batch.has_ended else msgspec.structs.replace(batch, counts=counts)

    async def stop(self) -> None:
        """Break off what runs; a later start goes on with it."""
        if self._leading is None:
            return
        tasks = [self._leading, *self._tasks.values()]
        self._leading = None
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _lead(self) -> None:
        """Start what can be started, whenever something has changed."""
        while True:
            self._changed.clear()
            live = await self._blocking(self._store.live_batches)
            owners = {batch.owner for batch in live}
            self._served = {owner: begun for owner, begun in self._served.items() if owner in owners}
            # Whoever has waited longest for a turn is first, however many batches others have sent before.
            for batch in sorted(live, key=lambda batch: self._served.get(batch.owner, 0)):
                if self._store.is_current(batch):
                    self._attend(batch)
                else:  # it has gone on since it was looked for
                    self.look()
            # Python 3.11's wait_for forgets that it is cancelled where what it waits for comes just then.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if live else None):
                    await self._changed.wait()

    def _attend(self, batch: BatchRecord) -> None:
        """Start what a batch needs next, if it can be now."""
        if (task := self._tasks.get(batch.id)) is not None:
            if batch.status is Status.CANCELLING and batch.id not in self._cancelled:
                self._cancelled.add(batch.id)
                task.cancel()
            return
        work: Callable[[], Coroutine[Any, Any, None]]
        match batch.status:
            case Status.VALIDATING if batch.owner in self._checked.values():
                return
            case Status.VALIDATING:
                self._checked[batch.id] = batch.owner
                work = functools.partial(self._check, batch)
            case Status.CANCELLING:
                work = functools.partial(self._end, batch, Status.CANCELLED)
            case Status.FINALIZING:
                end = batch.end or Status.COMPLETED
                work = functools.partial(self._end, batch, end, batch.faults)
            case _ if batch.expires_at <= self._store.now():
                work = functools.partial(self._end, batch, Status.EXPIRED)
            case _ if batch.owner in self._owners.values() or len(self._owners) >= MOST_RUNNING:
                return
            case _:
                self._owners[batch.id] = batch.owner
                self._served[batch.owner] = next(self._begun)
                work = functools.partial(self._run, batch)
        task = self._tasks[batch.id] = asyncio.ensure_future(self._attempt(batch, work))
        task.add_done_callback(lambda _: self._leave(batch))

    def _leave(self, batch: BatchRecord) -> None:
        """Forget what was done for a batch, and look what it needs next."""
        for kept in (self._tasks, self._owners, self._checked):
            kept.pop(batch.id, None)
        self._cancelled.discard(batch.id)
        self.look()

    async def _attempt(self, batch: BatchRecord, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do what a batch needs next. What another try may mend is tried again; a bug fails the batch."""
        try:
            try:
                await work()
            except _PASSING:
                raise
            except Exception as error:  # noqa: BLE001 - a bug ends one batch, and is logged
                await self._fail(batch, _logged(batch, error))
        except _PASSING as error:
            # The last kind quotes a refusal, which may quote the request.
            found = "no worker answers" if isinstance(error, BatchStoppedError) else error
            logger.error("%s cannot go on, and is tried again in %g s: %s", batch.id, RETRY_S, found)
            await asyncio.sleep(RETRY_S)

    async def _check(self, batch: BatchRecord) -> None:
        """Bring a batch from validating to in progress, or to failed."""
        async with self._checking:  # reads the whole input
            stopping = threading.Event()
            try:
                total = await self._blocking(lambda: self._work.check(batch, stopping), stopping.set)
            except BatchFaultError as error:
                await self._fail(batch, *error.faults)
                return
        await self._blocking(
            lambda: self._store.move(
                batch.id, Status.IN_PROGRESS, frozenset({Status.VALIDATING}), counts=Counts(total)
            )
        )

    async def _fail(self, batch: BatchRecord, *faults: Fault) -> None:
        """End a batch that has come to nothing, or that nobody can end otherwise."""
        live = frozenset(Status) - ENDED
        await self._blocking(lambda: self._store.move(batch.id, Status.FAILED, live, faults=faults))
        await self._blocking(lambda: self._store.tidy(batch))
        self._progress.pop(batch.id, None)

    async def _run(self, batch: BatchRecord) -> None:
        """Run a batch to its end, of whatever kind."""
        end, faults = Status.COMPLETED, tuple[Fault, ...]()
        try:
            async with asyncio.timeout(batch.expires_at - self._store.now()) as window:
                await self._run_within_room(batch)
        except TimeoutError:
            if not window.expired():
                raise
            end = Status.EXPIRED
        except BatchFaultError as error:
            end, faults = Status.FAILED, error.faults
        except _PASSING:
            raise
        except Exception as error:  # noqa: BLE001 - a bug ends one batch, and is logged
            end, faults = Status.FAILED, (_logged(batch, error),)
        await self._end(batch, end, faults)

    async def _run_within_room(self, batch: BatchRecord) -> None:
        """Run a batch for as long as its results have room."""

        def tell(counts: Counts) -> None:
            self._progress[batch.id] = counts

        tasks = [
            asyncio.ensure_future(self._work.run(batch, tell)),
            asyncio.ensure_future(self._watch_room(batch)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()

    async def _watch_room(self, batch: BatchRecord) -> None:
        """Raise BatchFaultError once the results of a batch have no room any more."""
        while True:
            try:
                await self._blocking(lambda: self._store.grow(batch, self._work.size(batch)))
            except HttpError as error:
                raise BatchFaultError((Fault(error.code, str(error)),)) from error
            await asyncio.sleep(LOOK_S)

    async def _end(self, batch: BatchRecord, end: Status, faults: tuple[Fault, ...] = ()) -> None:
        """Make files of the results of a batch and bring it to its last status."""
        stopping = threading.Event()
        begun = _CANCELLED_FROM if end is Status.CANCELLED else _ENDED_FROM

        def finish() -> None:
            found = self._store.move(batch.id, Status.FINALIZING, begun, end=end, faults=faults)
            if found.status is Status.FINALIZING:
                changes = self._work.end(found, stopping)
                self._store.move(batch.id, end, frozenset({Status.FINALIZING}), **changes)
                self._store.tidy(batch)

        await self._blocking(finish, stopping.set)
        self._progress.pop(batch.id, None)


def _logged(batch: BatchRecord, error: Exception) -> Fault:
    """Log a bug, and return what the owner of a batch is told of it."""
    error_id = secrets.token_hex(4)
    logger.error("%s failed, error id %s", batch.id, error_id, exc_info=error)
    return Fault("internal_error", f"internal error; the worker's log says more under error id {error_id}")
