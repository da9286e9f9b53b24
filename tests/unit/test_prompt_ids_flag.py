"""``--prompt-ids`` is a list or a file, and means the same to every command that has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llorch_serve.errors import UsageError
from llorch_serve.requests import TokenPrompt
from llorch_serve.terminal.bench_flags import LengthFlags
from llorch_serve.terminal.prompt_flags import MAX_IDS_FILE_BYTES, PromptFlags, read_prompt_ids


@pytest.mark.parametrize(
    ("value", "ids"), [("1,2,3", (1, 2, 3)), ("7", (7,)), (" 1 , 2,", (1, 2)), ("-1", (-1,)), ("", ())]
)
def test_numbers_separated_by_commas_are_a_list(value: str, ids: tuple[int, ...]) -> None:
    assert read_prompt_ids(value) == ids


def test_a_prompt_file_is_an_array_of_ids(tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    path.write_text("[5, 6, 7]\n")
    assert read_prompt_ids(str(path)) == (5, 6, 7)


@pytest.mark.parametrize(
    "content", ["", "[]", "5", '["5"]', "[1, null]", "[1.5]", "{}", "[true]", "[" * 100_000]
)
def test_other_prompt_files_are_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ids.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"ids\.json") as caught:
        read_prompt_ids(str(path))
    assert "\n" not in str(caught.value)


def test_missing_and_huge_prompt_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompt_ids(str(tmp_path / "absent"))
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(MAX_IDS_FILE_BYTES + 1)
    with pytest.raises(UsageError, match=str(MAX_IDS_FILE_BYTES)):
        read_prompt_ids(str(huge))


def test_a_file_whose_name_is_a_number_is_named_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "12").write_text("[5]")
    assert read_prompt_ids("12") == (12,)
    assert read_prompt_ids("./12") == (5,)


def test_what_is_neither_is_told_both() -> None:
    with pytest.raises(UsageError, match=r"'1,x'.*like 1,2,3, or a file with a JSON array"):
        read_prompt_ids("1,x")


def test_generate_and_bench_take_both(tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps([1, 2, 3]))
    for value in ("1,2,3", str(path)):
        assert PromptFlags(prompt_ids=value).read() == TokenPrompt((1, 2, 3))
        assert LengthFlags(prompt_ids=value).read() == (1, 2, 3)


def test_bench_needs_an_id() -> None:
    with pytest.raises(UsageError, match="at least one"):
        LengthFlags(prompt_ids="").read()
