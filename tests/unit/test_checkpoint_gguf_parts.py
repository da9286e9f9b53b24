"""A GGUF model in several files is read as one, whichever is given; parts that do not fit are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from llorch_export.source.open import fingerprint, list_content_files, open_checkpoint, open_config
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import write_gguf, write_hf_folder

NAMES = [f"m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Return a folder with a model of 21 tensors in three files."""
    (tmp_path / "split").mkdir()
    write_gguf(tmp_path / "split" / "m.gguf", seed=3, tensors_a_part=8)
    assert sorted(path.name for path in (tmp_path / "split").iterdir()) == NAMES
    return tmp_path / "split"


def _refusal(source: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_checkpoint(str(source))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("given", [*NAMES, ""], ids=["first", "second", "last", "folder"])
def test_a_split_model_is_read_as_one(parts: Path, tmp_path: Path, given: str) -> None:
    whole = open_checkpoint(str(write_gguf(tmp_path / "whole.gguf", seed=3)))
    found = open_checkpoint(str(parts / given))
    assert found.config == whole.config
    assert found.tokenizer == whole.tokenizer
    assert list(found.tensors) == list(whole.tensors)
    for name, tensor in found.tensors.items():
        np.testing.assert_array_equal(tensor.load(), whole.tensors[name].load(), err_msg=name)
    assert found.name == "m"
    assert found.path == parts / NAMES[0]
    assert found.content_files == tuple(parts / name for name in NAMES)
    assert list_content_files(str(parts / given)) == found.content_files
    assert open_config(str(parts / given)) == found.config


def test_the_first_part_may_have_metadata_alone(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors_a_part=10, empty_first_part=True)
    assert path.stat().st_size < 2**16
    assert len(open_checkpoint(str(path)).tensors) == 21


def test_every_part_counts_for_the_fingerprint(parts: Path) -> None:
    before = fingerprint(open_checkpoint(str(parts)))
    with (parts / NAMES[2]).open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\1")
    assert fingerprint(open_checkpoint(str(parts))) != before


def test_missing_parts_are_named(parts: Path) -> None:
    (parts / NAMES[0]).unlink()
    (parts / NAMES[2]).unlink()
    assert f"is one of 3 parts of a model, and {parts} lacks {NAMES[0]}, {NAMES[2]}" in _refusal(parts)


def test_a_long_list_of_missing_parts_is_cut(parts: Path) -> None:
    (parts / NAMES[0]).rename(parts / "m-00001-of-00300.gguf")
    message = _refusal(parts / "m-00001-of-00300.gguf")
    assert "and 291 more" in message
    assert len(message) < 1000


def test_a_count_that_no_model_has_is_refused_before_files_are_looked_for(parts: Path) -> None:
    (parts / NAMES[0]).rename(parts / "m-00001-of-99999.gguf")
    assert "one of 99999 parts; expected at most 4096" in _refusal(parts / "m-00001-of-99999.gguf")


def test_a_count_that_contradicts_the_names_is_refused(parts: Path) -> None:
    for number, name in enumerate(NAMES[:2], start=1):
        (parts / name).rename(parts / f"m-{number:05d}-of-00002.gguf")
    (parts / NAMES[2]).unlink()
    assert "says that it is one of 3 parts of a model, and its name says one of 2" in _refusal(parts)


def test_a_part_without_its_name_is_refused(parts: Path) -> None:
    (parts / NAMES[0]).rename(parts / "model.gguf")
    message = _refusal(parts / "model.gguf")
    assert "one of 3 parts of a model, and its name says that it is whole" in message
    assert "NAME-00001-of-0000N.gguf" in message


def test_a_whole_file_with_the_name_of_a_part_is_refused(parts: Path) -> None:
    for name in NAMES:
        write_gguf(parts / name)
    assert "says that it is one of 1 parts of a model, and its name says one of 3" in _refusal(parts)


@pytest.mark.parametrize("number", ["00000", "00004"])
def test_a_number_outside_the_count_is_refused(parts: Path, number: str) -> None:
    path = parts / f"m-{number}-of-00003.gguf"
    shutil.copy(parts / NAMES[0], path)
    assert f"is called part {int(number)} of 3; expected a number from 1 to 3" in _refusal(path)


def test_parts_that_were_renamed_are_refused(parts: Path) -> None:
    (parts / NAMES[1]).rename(parts / "x")
    (parts / NAMES[2]).rename(parts / NAMES[1])
    (parts / "x").rename(parts / NAMES[2])
    assert "says split.no 2, expected 1" in _refusal(parts)


def test_a_part_of_another_model_is_refused_by_what_both_hold(parts: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_gguf(other / "m.gguf", tensors_a_part=9)
    shutil.copy(other / NAMES[1], parts / NAMES[1])
    assert "both hold tensor" in _refusal(parts)


def test_a_total_that_is_wrong_is_refused(parts: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_gguf(other / "m.gguf", tensors_a_part=7)
    shutil.copy(other / NAMES[2], parts / NAMES[2])
    assert "both hold tensor" in _refusal(parts)
    writer = gguf.GGUFWriter(parts / NAMES[2], "llama")
    writer.add_uint16("split.no", 2)
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "says of general.architecture" not in (message := _refusal(parts))
    assert "says that its parts hold 21 tensors, and they hold 16" in message


def test_metadata_of_a_later_part_may_not_contradict_the_first(parts: Path) -> None:
    writer = gguf.GGUFWriter(parts / NAMES[2], "llama")
    writer.add_uint16("split.no", 2)
    writer.add_uint16("split.count", 3)
    writer.add_uint32("llama.block_count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert f"says of llama.block_count something else than {NAMES[0]}" in _refusal(parts)


def test_a_count_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"split.count": [3] * 100_000})
    assert "has split.count as tuple, expected a whole number" in _refusal(path)


def test_a_part_that_says_nothing_of_itself_is_refused(parts: Path) -> None:
    write_gguf(parts / NAMES[1])
    assert "says nothing of split.no, expected 1" in _refusal(parts)


def test_a_part_that_was_cut_short_is_named(parts: Path) -> None:
    with (parts / NAMES[1]).open("r+b") as file:
        file.truncate((parts / NAMES[1]).stat().st_size - 4096)
    assert f"{parts / NAMES[1]} has" in _refusal(parts)


def test_a_link_of_a_part_out_of_the_folder_is_refused(parts: Path, tmp_path: Path) -> None:
    (parts / NAMES[1]).rename(tmp_path / "elsewhere")
    (parts / NAMES[1]).symlink_to(tmp_path / "elsewhere")
    assert f"{parts / NAMES[1]} is a link that leads out of its folder" in _refusal(parts / NAMES[0])


def test_two_split_models_in_a_folder_are_a_choice(parts: Path) -> None:
    write_gguf(parts / "n.gguf", tensors_a_part=8)
    assert "6 GGUF files" in _refusal(parts)
    assert open_checkpoint(str(parts / "n-00002-of-00003.gguf")).name == "n"


def test_a_split_model_equals_the_folder_it_was_made_from(parts: Path, tmp_path: Path) -> None:
    folder = open_checkpoint(str(write_hf_folder(tmp_path / "hf", seed=3)))
    found = open_checkpoint(str(parts))
    for name, tensor in folder.tensors.items():
        np.testing.assert_array_equal(found.tensors[name].load(), tensor.load(), err_msg=name)
