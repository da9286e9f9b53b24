"""Results of batches as files: each line exactly once, wherever a worker dies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import threading

import pytest

from llorch_serve.batch.journal import Journal
from llorch_serve.batch.sources import JsonLinesSource, RawLine
from llorch_serve.http.batches import work
from llorch_serve.http.batches.folder import BatchFolder
from llorch_serve.http.batches.lookup import Page
from llorch_serve.http.batches.records import Counts, Status
from llorch_serve.http.batches.service import BatchService
from llorch_serve.http.batches.settings import BatchSettings
from llorch_serve.http.batches.work import BatchWork
from support.builders.batch_records import batch_record, kept_file
from support.fakes.batch import FakeAnswerer
from support.fakes.generator import PATIENCE_S
from support.harness.batches import CHAT, chat_lines

CHANGES = ("_write", "adopt", "remove_work", "remove_file")


class DyingDisk:
    """After so many changes of the folder none comes to the disk any more."""

    def __init__(self, patch, changes):
        self._left = changes
        self.died = False
        for name in CHANGES:
            patch.setattr(BatchFolder, name, self._dying(getattr(BatchFolder, name)))

    def _dying(self, change):
        def changed(*arguments):
            if not self._left:
                self.died = True
                raise OSError(errno.EIO, "it has died")
            self._left -= 1
            change(*arguments)

        return changed


@contextlib.asynccontextmanager
async def served(folder, answerer, fingerprint="model-1", **how):
    service = BatchService(BatchSettings(folder, **how))
    await service.open()
    service.start(BatchWork(service.store, service.blocking, lambda *_: answerer, lambda: fingerprint, 2))
    try:
        yield service
    finally:
        await service.close()


async def until(happened):
    async with asyncio.timeout(PATIENCE_S):
        while not happened():
            await asyncio.sleep(0)


def begun(service, content, **fields):
    batch = service.store.add_batch(batch_record(kept_file(service.store, content), **fields))
    service.look()
    return batch


def results(service, file_id):
    with service.store.open_file(file_id, "") as opened:
        return [json.loads(line) for line in opened]


async def broken_and_ended(folder, changes, *, expired):
    """Return whether the disk died; check what there is at the end in any case."""
    bad = b'{"custom_id": "bad", "url": "/v1/chat/completions", "body": 1}\n'
    async with served(folder, FakeAnswerer()) as service:
        now = service.store.now()
        fields = {"created_at": now - 3600, "seconds": 3600} if expired else {}
        with pytest.MonkeyPatch.context() as patch:
            batch = batch_record(kept_file(service.store, chat_lines(3) + bad), **fields)
            batch = service.store.add_batch(batch)
            disk = DyingDisk(patch, changes)
            service.look()
            await until(lambda: disk.died or service.store.batch(batch.id, "").has_ended)
            await service.stop()
    async with served(folder, FakeAnswerer()) as service:
        await until(lambda: service.store.batch(batch.id, "").has_ended)
        await until(lambda: not list((folder / "work").iterdir()))
        found = service.store.batch(batch.id, "")
        expected = (Status.EXPIRED, Counts(4, 0, 4)) if expired else (Status.COMPLETED, Counts(4, 3, 1))
        assert (found.status, found.counts) == expected
        failed = [line["custom_id"] for line in results(service, found.error_file_id)]
        if expired:
            assert sorted(failed) == ["a0", "a1", "a2", "bad"]
            assert found.results == (found.error_file_id,)
        else:
            assert failed == ["bad"]
            assert sorted(line["custom_id"] for line in results(service, found.output_file_id)) == [
                "a0",
                "a1",
                "a2",
            ]
        files, _ = service.store.list_files("", Page(100), None)
        assert {file.id for file in files} == {batch.input_file_id, *found.results}
        assert len(list((folder / "files").iterdir())) == 2 * len(files)
    return disk.died


@pytest.mark.parametrize("expired", [False, True], ids=["completed", "expired"])
def test_wherever_the_disk_dies_the_next_start_ends_the_batch_with_each_line_once(tmp_path, expired):
    async def all_of_them():
        changes = 0
        while await broken_and_ended(tmp_path / str(changes), changes, expired=expired):
            changes += 1
        return changes

    assert asyncio.run(all_of_them()) >= 5


def test_a_model_that_has_been_replaced_does_not_go_on(tmp_path):
    async def replaced():
        answerer = FakeAnswerer(turns=lambda line: 0 if line.custom_id == "a0" else 10**9)
        async with served(tmp_path, answerer) as service:
            batch = begun(service, chat_lines(3))
            await until(lambda: service.now(service.store.batch(batch.id, "")).counts.completed == 1)
        async with served(tmp_path, FakeAnswerer(), "model-2") as service:
            await until(lambda: service.store.batch(batch.id, "").has_ended)
            found = service.store.batch(batch.id, "")
            assert (found.status, found.counts) == (Status.FAILED, Counts(3, 1, 0))
            (fault,) = found.faults
            assert fault.code == "model_changed"
            assert str(tmp_path) not in fault.message
            assert [line["custom_id"] for line in results(service, found.output_file_id)] == ["a0"]

    asyncio.run(replaced())


def test_an_input_that_has_gone_fails_its_batch(tmp_path):
    async def gone():
        async with served(tmp_path, FakeAnswerer()) as service:
            file = kept_file(service.store, chat_lines(3))
            service.store.folder.content(file.id).unlink()
            batch = service.store.add_batch(batch_record(file))
            service.look()
            await until(lambda: service.store.batch(batch.id, "").status is Status.FAILED)
            (fault,) = service.store.batch(batch.id, "").faults
            assert file.id in fault.message
            assert str(tmp_path) not in fault.message

    asyncio.run(gone())


def test_lines_of_all_batches_share_the_places(tmp_path):
    async def shared():
        answerer = FakeAnswerer(turns=lambda _: 5)
        async with served(tmp_path, answerer) as service:
            files = [kept_file(service.store, chat_lines(20), owner) for owner in "abc"]
            batches = [service.store.add_batch(batch_record(file)) for file in files]
            service.look()
            await until(lambda: all(service.store.batch(b.id, b.owner).has_ended for b in batches))
        assert len(answerer.asked) == 60
        assert answerer.most_at_once == 2

    asyncio.run(shared())


def test_a_file_of_too_many_requests_fails_its_batch_before_all_of_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "MAX_REQUESTS", 5)

    async def checked():
        async with served(tmp_path, FakeAnswerer()) as service:
            right, many = (begun(service, chat_lines(count)) for count in (5, 6))
            await until(lambda: all(service.store.batch(one.id, "").has_ended for one in (right, many)))
            assert service.store.batch(right.id, "").status is Status.COMPLETED
            found = service.store.batch(many.id, "")
            assert found.status is Status.FAILED
            [fault] = found.faults
            assert fault.code == "invalid_file"
            told = "has more than 5 requests, the most of a batch; send them in several files"
            assert fault.message == f"{many.input_file_id} {told}"

    asyncio.run(checked())


def test_lines_that_expire_take_no_more_than_their_callers_room(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "_AT_ONCE", 10)

    async def expired():
        async with served(tmp_path, FakeAnswerer(), caller_bytes=60_000) as service:
            file = kept_file(service.store, chat_lines(200))
            now = service.store.now()
            fields = {"created_at": now - 3600, "seconds": 3600}
            batches = [service.store.add_batch(batch_record(file, **fields)) for _ in range(4)]
            service.look()
            await until(lambda: all(service.store.batch(one.id, "").has_ended for one in batches))
            files, _ = service.store.list_files("", Page(100), None)
            assert sum(file.size for file in files) <= 60_000
            ended = [service.store.batch(one.id, "") for one in batches]
            assert {one.status for one in ended} == {Status.EXPIRED}
            assert "quota_exceeded" in {fault.code for one in ended for fault in one.faults}
            assert {one.counts.total for one in ended} == {200}

    asyncio.run(expired())


@pytest.mark.parametrize("status", [Status.VALIDATING, Status.IN_PROGRESS])
def test_a_stop_does_not_wait_until_a_long_file_is_read(tmp_path, monkeypatch, status):
    async def stopped():
        answerer, reading, lines = FakeAnswerer(), asyncio.Event(), []
        loop = asyncio.get_running_loop()

        def endless(_self):
            for number in itertools.count(1):
                lines.append(number)
                if number == 1000:
                    loop.call_soon_threadsafe(reading.set)
                raw = json.dumps({"custom_id": f"a{number}", "url": CHAT, "body": {}}).encode()
                yield RawLine(number, 0, len(raw), raw)

        monkeypatch.setattr(JsonLinesSource, "scan", endless)
        async with asyncio.timeout(PATIENCE_S), served(tmp_path, answerer) as service:
            batch = begun(service, b"{}", status=status)
            await reading.wait()
        found = BatchService(BatchSettings(tmp_path))
        await found.open()
        assert found.store.batch(batch.id, "").status is status
        await found.close()
        assert answerer.asked == []

    asyncio.run(stopped())


def test_a_stop_does_not_wait_until_all_lines_that_expire_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "_AT_ONCE", 1)

    async def stopped():
        writing, write, written = asyncio.Event(), Journal.write, []
        loop = asyncio.get_running_loop()

        def told(journal, records):
            write(journal, records)
            written.append(records)
            if len(written) == 1:
                loop.call_soon_threadsafe(writing.set)
            is_stopping.wait(PATIENCE_S)

        is_stopping = threading.Event()
        monkeypatch.setattr(Journal, "write", told)
        async with served(tmp_path, FakeAnswerer()) as service:
            now = service.store.now()
            batch = begun(service, chat_lines(100), created_at=now - 3600, seconds=3600)
            await writing.wait()
            stopping = asyncio.ensure_future(service.stop())
            await asyncio.sleep(0)
            loop.call_later(0, is_stopping.set)
            await stopping
        assert len(written) == 1
        monkeypatch.setattr(Journal, "write", write)
        async with served(tmp_path, FakeAnswerer()) as service:
            await until(lambda: service.store.batch(batch.id, "").has_ended)
            found = service.store.batch(batch.id, "")
            assert found.counts == Counts(100, 0, 100)
            failed = [line["custom_id"] for line in results(service, found.error_file_id)]
            assert sorted(failed) == sorted(f"a{n}" for n in range(100))

    asyncio.run(stopped())
