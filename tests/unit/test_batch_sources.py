"""A batch's input may be any text file of lines; what is none is refused before anything runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llorch_serve.batch import sources
from llorch_serve.batch.plan import BatchInputError
from llorch_serve.batch.sources import JsonLinesSource, RawLine
from llorch_serve.errors import UsageError
from support.fakes.batch import FakeAnswerer, opened, run


def bare(text: str, **more: object) -> bytes:
    return json.dumps({"prompt": text, **more}).encode()


def scanned(path: Path) -> list[RawLine]:
    source = JsonLinesSource(path)
    found = list(source.scan())
    assert [source.read(line.place, line.size) for line in found if line.raw is not None] == [
        line.raw for line in found if line.raw is not None
    ]
    source.close()
    return found


@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_marks_ends_and_blank_lines_do_no_harm(tmp_path: Path, begin: bytes, end: bytes, last: bool) -> None:
    lines = [bare("a"), b"", b"  \t ", bare("b"), bare("c")]
    path = tmp_path / "in.jsonl"
    path.write_bytes(begin + end.join(lines) + (end if last else b""))
    found = scanned(path)
    assert [(line.number, line.raw) for line in found] == [(1, lines[0]), (4, lines[3]), (5, lines[4])]
    assert run(path, tmp_path / "out.jsonl").answered == 3


def test_a_line_too_long_is_not_held_and_its_number_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 100)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join([bare("a"), bare("x" * 5000), bare("b")]) + b"\n")
    found = scanned(path)
    assert [line.raw is None for line in found] == [False, True, False]
    assert found[2].raw == bare("b")
    with pytest.raises(BatchInputError, match=r"^line 2 has 5015 bytes; expected at most \d+$"):
        run(path, tmp_path / "out.jsonl")


@pytest.mark.parametrize("size", range(97, 106))
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_bound_is_the_same_for_every_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, end: bytes
) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 100)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * size + end)
    assert [line.raw is not None for line in scanned(path)] == [size <= 100]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("x".encode("utf-16"), "is in UTF-16; give JSON Lines in UTF-8"),
        (b"\x1f\x8b\x08\x00", "is in gzip"),
        (b"\x28\xb5\x2f\xfd", "is in zstd"),
        (b"", "holds no lines"),
        (b"\n \n", "holds no lines"),
    ],
)
def test_what_is_no_file_of_lines_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=reason):
        run(path, tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == [path]


def test_what_can_be_read_once_only_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is no file, and lines are read twice"):
        run(tmp_path / "pipe", tmp_path / "out.jsonl")
    with pytest.raises(UsageError, match="is a folder"):
        run(tmp_path, tmp_path / "out.jsonl")
    with pytest.raises(UsageError, match="does not exist"):
        run(tmp_path / "none", tmp_path / "out.jsonl")


def test_lines_that_cannot_be_told_apart_stop_the_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join([bare("a", custom_id="x"), b"{", bare("b"), b"7"]))
    with pytest.raises(BatchInputError) as found:
        run(path, tmp_path / "out.jsonl")
    assert [refusal.number for refusal in found.value.refusals] == [2, 4]
    assert str(found.value).startswith(
        "line 2 is no object in JSON (Input data was truncated): '{'; line 4 is"
    )


def test_of_many_bad_lines_the_first_are_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"{\n" * 50)
    with pytest.raises(BatchInputError, match=r"and 30 more lines$") as found:
        run(path, tmp_path / "out.jsonl")
    assert len(found.value.refusals) == 20


def test_an_id_twice_is_refused_and_both_lines_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join([bare("a"), b"", bare("b", custom_id="line-1"), bare("c")]))
    with pytest.raises(BatchInputError, match=r"^line 3 has the custom_id of line 1; each line needs one"):
        run(path, tmp_path / "out.jsonl")
    path.write_bytes(b"\n".join(bare("a", custom_id=f"x{n // 2}") for n in range(60)))
    with pytest.raises(BatchInputError, match=r"line 40 has .* and 10 more lines$"):
        run(path, tmp_path / "out.jsonl")


def test_an_input_that_changes_while_it_runs_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(bare(f"text {n:04}", custom_id=f"q{n}") for n in range(600)))

    def change(line: object) -> int:
        content = path.read_bytes()
        if b"text 0599" in content:
            path.write_bytes(content.replace(b"text 0599", b"text 0000"))
        return 0

    with pytest.raises(UsageError, match=r"^line 600 of the input was changed while the batch ran"):
        run(path, tmp_path / "out.jsonl", FakeAnswerer(turns=change))
    with opened(path, tmp_path / "other.jsonl") as (plan, _):
        assert plan.counts.lines == 600
