"""A batch's output says what it was made from and what is done, and is never added to by mistake."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llorch_serve.artifact.lock import BeingWrittenError
from llorch_serve.batch import appending, in_order, sources
from llorch_serve.batch.appending import AppendedFile
from llorch_serve.batch.lines import LineForm
from llorch_serve.batch.place import hold_output
from llorch_serve.errors import ArtifactError, LlorchError, ResourceError, UsageError
from support.fakes.batch import FakeAnswerer, opened, run


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"custom_id": f"q{n}", "prompt": "x" * n}) + "\n" for n in range(20)))
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def test_the_header_holds_what_the_answers_depend_on(source: Path, output: Path) -> None:
    run(source, output, form=LineForm(settings={"seed": 7, "max_tokens": 3}))
    header = json.loads(output.with_name("out.jsonl.run.json").read_text())
    assert sorted(header) == sorted(
        ["version", "input_sha256", "settings_sha256", "settings", "fingerprint", "ordered"]
    )
    assert (header["settings"], header["fingerprint"]) == ({"max_tokens": 3, "seed": 7}, "model-1")


def test_what_differs_is_named_and_nothing_is_touched(source: Path, output: Path) -> None:
    form = LineForm(settings={"seed": 7, "top_p": 0.5})
    run(source, output, form=form)
    kept = {path: path.read_bytes() for path in output.parent.iterdir() if path != source}
    source.write_text(source.read_text() + '{"prompt": "one more"}\n')
    with pytest.raises(UsageError) as found:
        run(
            source,
            output,
            form=LineForm(settings={"seed": 8, "temperature": 0}),
            ordered=True,
            fingerprint="model-2",
        )
    told = str(found.value)
    assert "was begun with another input (SHA-256 " in told
    assert "other settings (seed 7, now 8; temperature not set, now 0; top_p 0.5, now not set)" in told
    assert "another model (fingerprint model-1, now model-2)" in told
    assert "answers as they were done (now answers in the input's order)" in told
    assert "choose another output, or remove out.jsonl and what lies beside it to begin anew" in told
    assert {path: path.read_bytes() for path in output.parent.iterdir() if path != source} == kept


def test_the_order_of_settings_is_no_difference(source: Path, output: Path) -> None:
    run(source, output, form=LineForm(settings={"a": 1, "b": {"c": 1, "d": 2}}))
    again = run(source, output, form=LineForm(settings={"b": {"d": 2, "c": 1}, "a": 1}))
    assert again.answered_before == 20


def test_a_file_of_somebody_else_is_left_alone(source: Path, output: Path) -> None:
    output.write_text("mine\n")
    with pytest.raises(UsageError, match=r"out.jsonl is there already and no batch wrote it"):
        run(source, output)
    assert output.read_text() == "mine\n"
    output.unlink()
    output.with_name("out.jsonl.errors.jsonl").write_text("mine\n")
    with pytest.raises(UsageError, match=r"errors.jsonl is there already"):
        run(source, output)


def test_an_empty_output_is_taken(source: Path, output: Path) -> None:
    output.touch()
    assert run(source, output).answered == 20


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: os.mkfifo(path), "is no file, and a batch goes on from its output"),
        (lambda path: path.mkdir(), "is no file, and a batch goes on from its output"),
        (lambda path: path.symlink_to("/dev/null"), "is no file, and a batch goes on from its output"),
        (lambda path: path.symlink_to(path.with_name("none") / "x"), "is no folder"),
    ],
)
def test_what_is_no_file_is_no_output(
    source: Path, output: Path, make: Callable[[Path], None], reason: str
) -> None:
    make(output)
    with pytest.raises(UsageError, match=reason):
        run(source, output)
    assert sorted(output.parent.iterdir()) == [source, output]


def test_a_link_is_no_second_output(source: Path, output: Path) -> None:
    link = output.with_name("link.jsonl")
    link.symlink_to(output)
    assert run(source, link).answered == 20
    assert link.is_symlink()
    assert run(source, output).answered_before == 20
    with hold_output(output), pytest.raises(BeingWrittenError), hold_output(link):
        pass


@pytest.mark.parametrize("name", ["out.jsonl.errors.jsonl", "out.jsonl.run.json", ".out.jsonl.work"])
def test_links_beside_the_output_are_not_followed(source: Path, output: Path, name: str) -> None:
    output.with_name(name).symlink_to(output.with_name("elsewhere"))
    with pytest.raises(UsageError, match=f"{name} is a link, and a file or folder of that name is needed"):
        run(source, output)
    assert not output.with_name("elsewhere").exists()


def test_what_a_killed_run_left_goes_with_the_next(source: Path, output: Path) -> None:
    work = output.with_name(".out.jsonl.work")
    work.mkdir()
    (work / "lines.sqlite3").write_bytes(b"torn")
    assert run(source, output).answered == 20
    assert not work.exists()


def test_only_one_run_writes(source: Path, output: Path) -> None:
    with opened(source, output), pytest.raises(BeingWrittenError, match="another batch is writing"):
        run(source, output)
    assert run(source, output).answered == 20


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is no header of a batch"),
        (b"[]", "is no header of a batch"),
        (b'{"version": 1}', "is no header of a batch"),
        (b"\xff", "is no header of a batch"),
        (b"[" * 10_000, "is no header of a batch"),
    ],
)
def test_a_damaged_header_is_refused(source: Path, output: Path, content: bytes, reason: str) -> None:
    run(source, output)
    output.with_name("out.jsonl.run.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=reason):
        run(source, output)


def test_a_header_of_a_newer_llorch_is_refused(source: Path, output: Path) -> None:
    run(source, output)
    path = output.with_name("out.jsonl.run.json")
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ArtifactError, match="has version 2, this llorch knows 1; go on with"):
        run(source, output)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"custom_id": "other"}\n', "the input has no custom_id 'other'"),
        (b'{"custom_id": "q3"}\n', "its line has an answer before it"),
        (b"\n", "truncated"),
        (b"{}\n", "missing required field"),
        (b'{"custom_id": 7}\n', "Expected"),
        (b"\0" * 100 + b"\n", "invalid character"),
    ],
)
def test_an_output_that_was_changed_is_refused(source: Path, output: Path, line: bytes, reason: str) -> None:
    run(source, output)
    whole = output.read_bytes()
    output.write_bytes(whole + line)
    told = rf"^the line at byte {len(whole)} of .*out.jsonl is not of this batch \(.*{reason}"
    with pytest.raises(ArtifactError, match=told):
        run(source, output)
    assert output.read_bytes() == whole + line


@pytest.mark.parametrize("ordered", [False, True])
def test_failures_stay_until_they_are_asked_for_again(source: Path, output: Path, ordered: bool) -> None:
    failing = FakeAnswerer(statuses={"q3": 400, "q11": 404})
    first = run(source, output, failing, ordered=ordered)
    assert (first.answered, first.failed, first.is_complete) == (18, 2, True)
    errors = output.with_name("out.jsonl.errors.jsonl")
    assert sorted(ids(errors)) == ["q11", "q3"]
    again = FakeAnswerer()
    assert run(source, output, again, ordered=ordered).failed_before == 2
    assert again.asked == []
    last = run(source, output, again, ordered=ordered, retry_failed=True)
    assert (last.answered, last.failed, sorted(again.asked)) == (20, 0, ["q11", "q3"])
    assert not errors.exists()
    other = output.with_name("other.jsonl")
    run(source, other, ordered=ordered)
    assert sorted(output.read_bytes().splitlines()) == sorted(other.read_bytes().splitlines())
    if ordered:
        assert output.read_bytes() == other.read_bytes()


def test_lines_lost_in_the_middle_come_back_in_their_places(source: Path, output: Path) -> None:
    run(source, output, ordered=True)
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:4] + lines[7:12]))
    answerer = FakeAnswerer()
    run(source, output, answerer, ordered=True)
    assert sorted(answerer.asked) == sorted(f"q{n}" for n in [4, 5, 6, *range(12, 20)])
    assert output.read_bytes() == whole
    assert sorted(path.name for path in output.parent.iterdir()) == [
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.run.json",
    ]


@pytest.mark.parametrize("room", [0, 1, 100, 1000, 3000])
def test_a_full_disk_leaves_whole_lines_and_is_gone_on_from(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    written = 0
    real = os.write

    def write(handle: int, data: bytes) -> int:
        nonlocal written
        fits = min(len(data), room - written)
        if not fits:
            raise no_space()
        written += fits
        return real(handle, data[:fits])

    with monkeypatch.context() as patched:
        patched.setattr(appending.os, "write", write)
        with pytest.raises(ResourceError) as found:
            run(source, output, ordered=True)
    assert str(found.value).startswith(
        f"{output} cannot grow (No space left on device); what is in it is whole"
    )
    assert "make room and run the same command again" in str(found.value)
    assert output.read_bytes().endswith(b"\n") or not output.read_bytes()
    kept = ids(output)
    assert output.stat().st_size <= room
    answerer = FakeAnswerer()
    run(source, output, answerer, ordered=True)
    assert sorted(kept + answerer.asked) == sorted(f"q{n}" for n in range(20))
    other = output.with_name("other.jsonl")
    run(source, other, ordered=True)
    assert output.read_bytes() == other.read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on the size of files there")
def test_a_limit_on_the_size_of_files_is_told_as_a_full_disk(source: Path, output: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(source, output) as (_, journal):
        file = AppendedFile(output.with_name("other"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            with pytest.raises(ResourceError, match="cannot grow"):
                file.append(b"x" * 99 + b"\n" + b"y" * 2000 + b"\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert file.path.read_bytes() == b"x" * 99 + b"\n"
        file.append(b"z\n")
        file.close()
        assert file.path.read_bytes() == b"x" * 99 + b"\nz\n"
        assert journal.answered == 0


def test_a_disk_that_is_full_when_it_is_flushed_is_told(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_handle: int) -> None:
        raise no_space()

    with opened(source, output) as (_, journal):
        monkeypatch.setattr(appending.os, "fsync", full)
        with pytest.raises(ResourceError, match="make room and run the same command again"):
            journal.flush()


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("whole", [b"", b"a\n", b"a\nb\n"])
def test_whatever_follows_the_last_line_is_cut(tmp_path: Path, whole: bytes, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(whole + b"x" * size)
    file = AppendedFile(path)
    file.append(b"new\n")
    file.close()
    assert path.read_bytes() == whole + b"new\n"


def test_no_room_for_the_plan_is_told(source: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sqlite3.connect

    def small(*arguments: object, **how: object) -> sqlite3.Connection:
        table: sqlite3.Connection = real(*arguments, **how)  # type: ignore[call-overload]
        table.execute("PRAGMA max_page_count=2")
        return table

    source.write_text("".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(2000)))
    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", small)
        with pytest.raises(ResourceError, match=r"cannot be kept in .*\.work \(database or disk is full\)"):
            run(source, output)
    assert list(output.parent.iterdir()) == [source]


def test_no_room_to_put_lines_in_order_keeps_them(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(source, output, ordered=True)
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    mixed = b"".join([lines[3], *lines[:3], *lines[4:]])
    output.write_bytes(mixed)

    def full(*_: object) -> None:
        raise no_space()

    with monkeypatch.context() as patched:
        patched.setattr(in_order, "_copy", full)
        with pytest.raises(ResourceError, match="has all lines, and there is no room to put them into"):
            run(source, output, ordered=True)
    assert output.read_bytes() == mixed
    run(source, output, ordered=True)
    assert output.read_bytes() == whole


def test_an_answer_may_be_longer_than_any_line(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 100)
    run(source, output)
    assert max(map(len, output.read_bytes().splitlines())) > 102
    assert run(source, output).answered_before == 20


def test_a_folder_that_is_not_there_is_told(source: Path, tmp_path: Path) -> None:
    with pytest.raises(LlorchError, match="is no folder; make it first"):
        run(source, tmp_path / "none" / "out.jsonl")
