"""Parquet files are inputs and outputs of batches as files of lines are."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llorch_serve.batch.lines import LineForm
from llorch_serve.batch.plan import BatchInputError, Order
from llorch_serve.batch.tables import ParquetSource, is_parquet, write_parquet
from llorch_serve.errors import ProviderError, UsageError
from support.fakes.batch import FakeAnswerer, run

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(path: Path, columns: dict[str, Any], **how: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path, **how)
    return path


def bodies(path: Path, folder: Path) -> list[dict[str, Any]]:
    source = ParquetSource(path, folder)
    lines = list(source.scan())
    assert [source.read(line.place, line.size) for line in lines] == [line.raw for line in lines]
    source.close()
    return [json.loads(LineForm().read(line.number, line.raw or b"").body) for line in lines]


def test_a_table_gives_the_bytes_of_the_same_lines(tmp_path: Path) -> None:
    prompts = [f"text {n}" for n in range(700)]
    table = write(tmp_path / "in.parquet", {"custom_id": range(700), "prompt": prompts}, row_group_size=50)
    lines = tmp_path / "in.jsonl"
    lines.write_text(
        "".join(
            json.dumps({"custom_id": str(n), "prompt": one}, separators=(",", ":")) + "\n"
            for n, one in enumerate(prompts)
        )
    )
    for source in (table, lines):
        summary = run(source, tmp_path / f"{source.name}.out", order=Order.LONGEST, ordered=True)
        assert summary.answered == 700
    one, other = (
        [json.loads(line)["response"] for line in (tmp_path / f"{name}.out").read_text().splitlines()]
        for name in ("in.parquet", "in.jsonl")
    )
    assert one == other


def test_messages_are_structures_or_json(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x", "name": None}]
    one = write(
        tmp_path / "a.parquet", {"messages": [messages, [*messages, {"role": "tool", "content": None}]]}
    )
    assert bodies(one, tmp_path) == [
        {"messages": [{"role": "user", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "tool"}]},
    ]
    other = write(tmp_path / "b.parquet", {"messages": ['[{"role": "user", "content": "x"}]']})
    assert bodies(other, tmp_path) == [{"messages": [{"role": "user", "content": "x"}]}]


@pytest.mark.parametrize(
    "body", ['{"prompt":"x","max_tokens":3}', {"prompt": "x", "max_tokens": 3, "n": None}]
)
def test_openai_lines_may_be_rows(tmp_path: Path, body: object) -> None:
    columns = {"custom_id": ["a"], "method": ["POST"], "url": ["/v1/completions"], "body": [body]}
    assert bodies(write(tmp_path / "a.parquet", columns), tmp_path) == [{"prompt": "x", "max_tokens": 3}]


def test_other_columns_are_left_aside_and_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"label": [1], "prompt": ["x"], "when": [None]})
    source = ParquetSource(path, tmp_path)
    assert source.left_aside == ("label", "when")
    assert [line.raw for line in source.scan()] == [b'{"prompt":"x"}']
    source.close()


def test_a_table_without_anything_to_answer_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["x"], "label": [1]})
    with pytest.raises(UsageError, match="has the columns text, label; expected custom_id, url and body, or"):
        run(path, tmp_path / "out.jsonl")


def test_rows_that_are_bad_are_told_by_number(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"custom_id": ["a", "b", "a"], "prompt": ["x", None, "y"]})
    with pytest.raises(BatchInputError, match="line 3 has the custom_id of line 1"):
        run(path, tmp_path / "out.jsonl")
    path = write(tmp_path / "b.parquet", {"custom_id": ["a", "b"], "prompt": ["x", None]})
    summary = run(path, tmp_path / "out.jsonl")
    assert (summary.answered, summary.failed) == (1, 1)


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"PAR1" + b"\0" * 100 + b"PAR1", b'{"prompt": "x"}\n' * 50]
)
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"a.parquet cannot be read as Parquet: "):
        run(path, tmp_path / "out.jsonl")
    with pytest.raises(UsageError, match="does not exist"):
        run(tmp_path / "none.parquet", tmp_path / "out.jsonl")


@pytest.mark.parametrize("at", range(0, 900, 60))
def test_a_damaged_table_is_refused_or_run(tmp_path: Path, at: int) -> None:
    path = write(tmp_path / "a.parquet", {"prompt": [f"text {n}" for n in range(100)]})
    content = bytearray(path.read_bytes())
    content[at : at + 20] = b"\xff" * 20
    path.write_bytes(content)
    with contextlib.suppress(UsageError):  # anything else would be a traceback for the caller
        run(path, tmp_path / "out.jsonl")


def test_answers_and_failures_become_a_table(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [{"custom_id": f"q{n}", "prompt": "x"} for n in range(600)] + [{"custom_id": "bad", "body": 1}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "out.parquet.jsonl"
    run(source, output, FakeAnswerer(statuses={"q7": 400}), ordered=True)
    write_parquet(output, output.with_name(f"{output.name}.errors.jsonl"), tmp_path / "out.parquet")
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["custom_id"] for row in rows] == [f"q{n}" for n in range(600) if n != 7] + ["q7", "bad"]
    assert [row["status_code"] for row in rows[-3:]] == [200, 400, None]
    assert set(json.loads(rows[0]["body"])) == {"text"}
    assert rows[-1]["error_message"].startswith("line 601: has the body '1'")
    assert not list(tmp_path.glob(".out.parquet*"))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"choices": [{"message": {"role": "assistant", "content": "hello"}}]}, "hello"),
        ({"choices": [{"message": {"role": "assistant", "content": None}}]}, None),
        ({"choices": [{"text": "hello"}]}, "hello"),
        ({"choices": []}, None),
        ({"data": [{"embedding": [1.0]}]}, None),
        ([], None),
    ],
)
def test_the_first_text_has_a_column_of_its_own(tmp_path: Path, body: object, text: str | None) -> None:
    answers = tmp_path / "out.jsonl"
    response = {"status_code": 200, "request_id": "r", "body": body}
    line = {"id": "batch_req_1", "custom_id": "a", "response": response, "error": None}
    answers.write_text(json.dumps(line) + "\n")
    write_parquet(answers, tmp_path / "none", tmp_path / "out.parquet")
    (row,) = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert (row["text"], json.loads(row["body"])) == (text, body)


def test_without_pyarrow_the_line_to_install_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "in.parquet", {"prompt": ["x"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ProviderError, match=r"pyarrow is not installed.*pip install 'llorch\[parquet\]'$"):
        run(path, tmp_path / "out.jsonl")


def test_a_table_is_known_by_its_name() -> None:
    assert is_parquet(Path("a.PARQUET"))
    assert not is_parquet(Path("parquet"))
