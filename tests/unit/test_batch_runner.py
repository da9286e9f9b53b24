"""What becomes of batches: their turns, their ends, and what another try mends, with work that is played."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import threading

from llorch_serve.batch.answering import BatchStoppedError
from llorch_serve.errors import ResourceError
from llorch_serve.http.batches import runner
from llorch_serve.http.batches.records import Counts, Fault, Status
from llorch_serve.http.batches.runner import BatchFaultError
from llorch_serve.http.batches.service import BatchService
from llorch_serve.http.batches.settings import BatchSettings
from llorch_serve.http.problems import HttpError
from support.builders.batch_records import batch_record, kept_file
from support.fakes.generator import PATIENCE_S


class PlayedWork:
    """Runs for as long as a test says. problems: what the next runs of a batch end with."""

    def __init__(self):
        self.may_end = asyncio.Event()
        self.running: set[str] = set()
        self.most = 0
        self.checked: list[str] = []
        self.ran: list[str] = []
        self.problems: list[Exception] = []
        self.check_problem: Exception | None = None
        self.bytes = 0

    def check(self, batch, _stopping):
        self.checked.append(batch.id)
        if self.check_problem is not None:
            raise self.check_problem
        return 3

    async def run(self, batch, tell):
        self.ran.append(batch.id)
        self.running.add(batch.id)
        self.most = max(self.most, len(self.running))
        try:
            if self.problems:
                raise self.problems.pop(0)
            tell(Counts(3, 1, 0))
            await self.may_end.wait()
        finally:
            self.running.discard(batch.id)

    def size(self, batch):
        return self.bytes

    def end(self, batch, _stopping):
        return {"counts": Counts(3, 2, 1)}


@contextlib.asynccontextmanager
async def served(folder, work, **how):
    service = BatchService(BatchSettings(folder, **how))
    await service.open()
    service.start(work)
    try:
        yield service
    finally:
        await service.close()


def begun(service, owner="", **fields):
    batch = service.store.add_batch(batch_record(kept_file(service.store, b"{}", owner), **fields))
    service.look()
    return batch


async def until(happened):
    async with asyncio.timeout(PATIENCE_S):
        while not happened():
            await asyncio.sleep(0)


def status_of(service, batch):
    return service.store.batch(batch.id, batch.owner).status


def on_loop(test):
    """Run a test on an event loop of its own."""

    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(test(**fixtures))

    return run


@on_loop
async def test_a_caller_has_one_batch_at_a_time_and_few_callers_run_beside_each_other(tmp_path):
    work = PlayedWork()
    async with served(tmp_path, work) as service:
        first = [begun(service, "a") for _ in range(3)]
        others = [begun(service, owner) for owner in "bcdef"]
        await until(lambda: len(work.running) == runner.MOST_RUNNING)
        await until(lambda: len(work.checked) == 8)
        assert len(set(work.ran)) == len(work.ran) == runner.MOST_RUNNING
        assert {batch.id for batch in first}.intersection(work.ran) == {first[0].id}
        assert service.now(service.store.batch(first[0].id, "a")).counts == Counts(3, 1, 0)
        work.may_end.set()
        await until(lambda: {status_of(service, batch) for batch in first + others} == {Status.COMPLETED})
        assert work.most == runner.MOST_RUNNING
        assert [name for name in work.ran if name in {batch.id for batch in first}] == [
            batch.id for batch in first
        ]


@on_loop
async def test_a_caller_that_waits_comes_before_those_that_have_had_their_turn(tmp_path):
    work = PlayedWork()
    async with served(tmp_path, work) as service:
        batches = [begun(service, owner) for owner in "abcdabcde"]
        await until(lambda: {status_of(service, batch) for batch in batches} == {Status.IN_PROGRESS})
        await until(lambda: len(work.running) == runner.MOST_RUNNING)
        work.may_end.set()
        await until(lambda: {status_of(service, batch) for batch in batches} == {Status.COMPLETED})
        assert work.ran[runner.MOST_RUNNING] == batches[8].id


@on_loop
async def test_many_batches_of_one_caller_are_checked_in_turns_with_those_of_others(tmp_path):
    work, may_go_on, is_checking = PlayedWork(), threading.Event(), threading.Semaphore(0)
    check = work.check

    def slowly(batch, stopping):
        is_checking.release()
        assert may_go_on.wait(PATIENCE_S)
        return check(batch, stopping)

    work.check = slowly
    async with served(tmp_path, work) as service:
        try:
            many = [begun(service, "a") for _ in range(5)]
            await until(lambda: is_checking.acquire(blocking=False))
            one = begun(service, "b")
            for _ in range(3):  # until the runner has seen it
                await service.blocking(lambda: None)
        finally:
            may_go_on.set()
        await until(lambda: len(work.checked) == 6)
        assert one.id in work.checked[:3]
        assert [name for name in work.checked if name != one.id] == [batch.id for batch in many]


@on_loop
async def test_a_fault_of_the_input_fails_the_batch(tmp_path):
    work = PlayedWork()
    work.check_problem = BatchFaultError((Fault("invalid_line", "line 3 is bad", 3),))
    async with served(tmp_path, work) as service:
        batch = begun(service)
        await until(lambda: status_of(service, batch) is Status.FAILED)
        found = service.store.batch(batch.id, "")
        assert found.faults == (Fault("invalid_line", "line 3 is bad", 3),)
        assert work.ran == []


@on_loop
async def test_what_another_try_may_mend_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "RETRY_S", 0.0)
    work = PlayedWork()
    work.problems = [
        OSError(errno.EIO, "the disk is tired"),
        ResourceError("the disk is full"),
        BatchStoppedError("nobody answers"),
    ]
    work.may_end.set()
    async with served(tmp_path, work) as service:
        batch = begun(service)
        await until(lambda: status_of(service, batch) is Status.COMPLETED)
        assert work.ran == [batch.id] * 4


@on_loop
async def test_a_batch_that_waits_for_another_try_can_be_cancelled(tmp_path):
    work = PlayedWork()
    work.problems = [ResourceError("the disk is full")]
    async with served(tmp_path, work) as service:
        batch = begun(service)
        await until(lambda: work.ran and not work.problems)
        service.store.move(batch.id, Status.CANCELLING, frozenset({Status.IN_PROGRESS}))
        service.look()
        await until(lambda: status_of(service, batch) is Status.CANCELLED)
        assert work.ran == [batch.id]


@on_loop
async def test_a_bug_ends_one_batch_and_tells_only_an_id(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(runner.logger, "error", lambda *parts, **_: told.append(parts))
    work = PlayedWork()
    work.problems = [ZeroDivisionError("secret words")]
    work.may_end.set()
    async with served(tmp_path, work) as service:
        broken, sound = begun(service, "a"), begun(service, "b")
        await until(lambda: status_of(service, sound) is Status.COMPLETED)
        await until(lambda: status_of(service, broken) is Status.FAILED)
        found = service.store.batch(broken.id, "a")
        assert found.counts == Counts(3, 2, 1)  # what had been answered is kept
        (fault,) = found.faults
        assert fault.code == "internal_error"
        assert "secret" not in fault.message
        assert told[0][2] in fault.message


@on_loop
async def test_a_batch_expires_while_it_runs(tmp_path):
    work = PlayedWork()
    async with served(tmp_path, work) as service:
        batch = begun(service, seconds=1)
        await until(lambda: status_of(service, batch) is Status.EXPIRED)
        found = service.store.batch(batch.id, "")
        assert (found.end, found.counts) == (Status.EXPIRED, Counts(3, 2, 1))
        assert not work.running


@on_loop
async def test_what_runs_is_broken_off_by_a_stop_and_goes_on_with_the_next_start(tmp_path):
    work = PlayedWork()
    async with served(tmp_path, work) as service:
        batch = begun(service)
        await until(lambda: work.running)
    assert not work.running
    again = PlayedWork()
    again.may_end.set()
    async with served(tmp_path, again) as service:
        await until(lambda: status_of(service, batch) is Status.COMPLETED)
        assert (again.checked, again.ran) == ([], [batch.id])


@on_loop
async def test_what_was_being_ended_is_ended_by_the_next_start(tmp_path):
    for status, end, expected in (
        (Status.FINALIZING, Status.EXPIRED, Status.EXPIRED),
        (Status.CANCELLING, None, Status.CANCELLED),
    ):
        async with served(tmp_path / status.value, PlayedWork()) as service:
            batch = begun(service, status=status, end=end)
        async with served(tmp_path / status.value, PlayedWork()) as service:
            await until(lambda: status_of(service, batch) is expected)  # noqa: B023 - at once


@on_loop
async def test_results_without_room_fail_the_batch(tmp_path):
    work = PlayedWork()
    work.bytes = 2000
    async with served(tmp_path, work, caller_bytes=1000) as service:
        batch = begun(service)
        await until(lambda: status_of(service, batch) is Status.FAILED)
        assert service.store.batch(batch.id, "").faults[0].code == "quota_exceeded"

        def have_room():
            with contextlib.suppress(HttpError):
                service.store.check_room("", 900)
                return True
            return False

        await until(have_room)  # they count no more


@on_loop
async def test_callers_do_not_wait_for_batches_that_take_long_to_end(tmp_path):
    work, may_end = PlayedWork(), threading.Event()
    is_ending = threading.Semaphore(0)

    def end(_batch, _stopping):
        is_ending.release()
        assert may_end.wait(PATIENCE_S)
        return {}

    work.end = end
    async with served(tmp_path, work) as service:
        try:
            batches = [begun(service, owner, status=Status.CANCELLING) for owner in "abcdefgh"]
            await until(lambda: is_ending.acquire(blocking=False))
            async with asyncio.timeout(PATIENCE_S / 2):
                assert await service.asked(lambda: service.store.batch(batches[0].id, "a")) is not None
        finally:
            may_end.set()
        await until(lambda: {status_of(service, batch) for batch in batches} == {Status.CANCELLED})


@on_loop
async def test_a_stop_is_heard_whatever_comes_with_it(tmp_path):
    for turns in range(20):
        work = PlayedWork()
        async with asyncio.timeout(PATIENCE_S), served(tmp_path / str(turns), work) as service:
            begun(service)
            await until(lambda: work.running)  # noqa: B023 - at once
            for _ in range(turns):
                await asyncio.sleep(0)
            service.look()


@on_loop
async def test_what_has_ended_since_it_was_looked_for_is_not_run_again(tmp_path):
    work = PlayedWork()
    async with served(tmp_path, work) as service:
        batch = begun(service)
        await until(lambda: work.running)
        (seen,) = service.store.live_batches()
        looked = 0

        def late():
            nonlocal looked
            looked += 1
            return [seen]

        work.may_end.set()
        await until(lambda: status_of(service, batch) is Status.COMPLETED)
        service.store.live_batches = late
        service.look()
        await until(lambda: looked > 20)
        assert work.ran == [batch.id]
