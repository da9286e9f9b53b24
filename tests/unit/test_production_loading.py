"""Load progress, the token rate, and what a load does when it is no longer wanted."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from llorch_serve.engine.load import TokenRate
from llorch_serve.errors import UnavailableError
from llorch_serve.loading.progress import READ_SHARE, LoadProgress, Progress, read_ahead


def test_reading_is_counted_and_only_serving_is_all(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3)
    (tmp_path / "b").write_bytes(b"x" * (9 * 2**20))
    (tmp_path / "folder").mkdir()
    progress = LoadProgress()
    assert progress.now() == Progress(0.0, 0, 0)
    read_ahead(sorted(tmp_path.iterdir()), progress)
    size = 9 * 2**20 + 3
    assert progress.now() == Progress(READ_SHARE, size, size)
    progress.finish()
    assert progress.now().percent == 100


def test_a_long_load_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    progress = LoadProgress(clock=lambda: now[0])
    caplog.set_level("INFO")
    progress.expect(100 * 2**20)
    for second in range(1, 13):
        now[0] = second
        progress.advance(5 * 2**20)
    assert [record.getMessage() for record in caplog.records] == [
        "loading: 22 %, 25 of 100 MiB read",
        "loading: 45 %, 50 of 100 MiB read",
    ]


def test_what_does_not_fit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3)
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=2))
    progress = LoadProgress()
    read_ahead([tmp_path / "a"], progress)
    assert progress.now() == Progress(0.0, 0, 3)


def test_a_file_that_cannot_be_read_is_left_to_whoever_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3)

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "open", refuse)
    progress = LoadProgress()
    read_ahead([tmp_path / "a"], progress)
    assert progress.now().loaded_bytes == 0


def test_a_cancelled_load_ends_where_it_next_looks(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    progress, stopped = LoadProgress(), []
    progress.stoppable(lambda: stopped.append(1))
    progress.cancel()
    assert stopped == [1]
    progress.stoppable(lambda: stopped.append(2))  # began too late to be stopped later
    assert stopped == [1, 2]
    progress.stoppable(None)
    with pytest.raises(UnavailableError):
        read_ahead([tmp_path / "a"], progress)


def test_a_rate_is_of_the_last_whole_seconds() -> None:
    rate = TokenRate()
    assert rate.per_second(100.0) == 0
    for second in range(100, 110):
        for part in (0.0, 0.5):
            rate.count(second + part, 4)
    assert rate.per_second(109.9) == 8  # the second that still runs is not counted
    assert rate.per_second(110.0) == 8
    assert rate.per_second(113.0) == 8 * 2 / 5
    assert rate.per_second(200.0) == 0
