"""Links in artifacts and sources: those of hub caches and Kubernetes volumes are followed, and no others."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from llorch_export.source.open import open_checkpoint
from llorch_serve.artifact import links
from llorch_serve.artifact.folder import MANIFEST_NAME, load_artifact
from llorch_serve.artifact.links import link_roots, open_inside, open_real, real_file
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import write_gguf, write_hf_folder
from support.builders.linked_folders import as_folder_beside_a_volume, as_hub_snapshot, as_volume
from support.builders.tiny_artifact import CONTENT, write_tiny_artifact

LAYOUTS: dict[str, Callable[[Path, Path], Path]] = {
    "hub": as_hub_snapshot,
    "folder in a hub repository": lambda files, place: as_hub_snapshot(files, place, inner="cpu/int4"),
    "volume": as_volume,
    "folder in a volume": lambda files, place: as_volume(files, place, inner="model"),
    "folder beside a volume": lambda files, place: as_folder_beside_a_volume(files, place, "model"),
}


@pytest.fixture(params=LAYOUTS)
def linked(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], Path]:
    """Return what makes a folder into one of links."""
    return lambda files: LAYOUTS[request.param](files, tmp_path / "links")


def test_an_artifact_of_links_is_whole(linked: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = linked(write_tiny_artifact(tmp_path / "artifact"))
    assert (folder / MANIFEST_NAME).is_symlink() or folder.is_symlink()
    artifact = load_artifact(folder, verify_hashes=True)
    assert artifact.chat_templates() == {"default": CONTENT["chat_template.jinja"].decode()}


def test_a_source_of_links_opens(linked: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = linked(write_hf_folder(tmp_path / "m", shards=3))
    assert len(open_checkpoint(str(folder)).tensors) == 21


def test_a_source_of_links_to_a_gguf_file_in_parts_opens(
    linked: Callable[[Path], Path], tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    write_gguf(tmp_path / "m" / "m.gguf", tensors_a_part=8)
    assert len(open_checkpoint(str(linked(tmp_path / "m"))).tensors) == 21


def test_a_gguf_file_may_be_given_by_a_link_to_anywhere(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "models").mkdir()
    target = write_gguf(tmp_path / "disk" / "m.gguf")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "models" / name).symlink_to(target)
    assert open_checkpoint(str(tmp_path / "models" / "a.gguf")).name == "a"


# What a stranger may put into a folder, and what reading it would reach.
def _outside(folder: Path) -> None:
    (folder / "model.onnx").symlink_to(folder.parent / "secret")


def _by_dots(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "model.onnx").symlink_to("sub/../../secret")


def _chain(folder: Path) -> None:
    (folder / "one").symlink_to("two")
    (folder / "two").symlink_to(folder.parent / "secret")
    (folder / "model.onnx").symlink_to("one")


def _through_a_folder(folder: Path) -> None:
    (folder / "sub").symlink_to("..")
    (folder / "model.onnx").symlink_to("sub/secret")


def _own_volume_that_leads_out(folder: Path) -> None:
    (folder / "..data").symlink_to(folder.parent)
    (folder / "model.onnx").symlink_to("..data/secret")


def _own_version_that_leads_out(folder: Path) -> None:
    (folder / "..1").symlink_to(folder.parent)
    (folder / "..data").symlink_to("..1")
    (folder / "model.onnx").symlink_to("..data/secret")


def _data_is_the_parent(folder: Path) -> None:
    (folder / "..data").symlink_to("..")
    (folder / "model.onnx").symlink_to("..data/secret")


ATTACKS = [
    _outside,
    _by_dots,
    _chain,
    _through_a_folder,
    _own_volume_that_leads_out,
    _own_version_that_leads_out,
    _data_is_the_parent,
]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", ["model.onnx", MANIFEST_NAME])
def test_links_out_of_an_artifact_are_refused(
    tmp_path: Path, attack: Callable[[Path], None], name: str
) -> None:
    folder = write_tiny_artifact(tmp_path / "artifact")
    (folder / name).rename(tmp_path / "secret")
    if name == MANIFEST_NAME:
        (folder / "model.onnx").unlink()
    attack(folder)
    if name == MANIFEST_NAME:
        (folder / "model.onnx").rename(folder / MANIFEST_NAME)
    with pytest.raises(ArtifactError, match=r"is a link that leads out of its folder, to .*cp -L"):
        load_artifact(folder)


@pytest.mark.parametrize("attack", ATTACKS)
def test_links_out_of_a_source_are_refused(tmp_path: Path, attack: Callable[[Path], None]) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(tmp_path / "secret")
    attack(folder)
    (folder / "model.onnx").rename(folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"model.safetensors is a link that leads out of its folder"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("kind", ["blob", "blobs", "other repository"])
def test_a_snapshot_reaches_only_real_blobs_of_its_own_repository(tmp_path: Path, kind: str) -> None:
    snapshot = as_hub_snapshot(write_tiny_artifact(tmp_path / "artifact"), tmp_path / "cache")
    repository = snapshot.parent.parent
    target = (snapshot / "model.onnx").resolve()
    if kind == "blob":
        target.rename(tmp_path / "secret")
        target.symlink_to(tmp_path / "secret")
    elif kind == "blobs":
        (repository / "blobs").rename(tmp_path / "elsewhere")
        (repository / "blobs").symlink_to(tmp_path / "elsewhere")
    else:
        other = tmp_path / "cache" / "models--org--other" / "blobs"
        other.mkdir(parents=True)
        target.rename(other / target.name)
        (snapshot / "model.onnx").unlink()
        (snapshot / "model.onnx").symlink_to(other / target.name)
    with pytest.raises(ArtifactError, match="is a link that leads out of its folder"):
        load_artifact(snapshot)


def test_folders_that_only_resemble_a_cache_or_a_volume_give_no_room(tmp_path: Path) -> None:
    for name in ("models--a--b/snapshots", "other/snapshots/x", "models--a--b/revisions/x"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        assert link_roots(folder) == (folder,)
    (tmp_path / "..data").mkdir()
    assert link_roots(tmp_path) == (tmp_path,)


def test_a_new_version_of_a_volume_is_read_after_the_change(tmp_path: Path) -> None:
    folder = as_volume(write_tiny_artifact(tmp_path / "artifact"), tmp_path / "volume")
    old = (folder / "..data").resolve()
    new = folder / "..2026_11_30"
    shutil.copytree(old, new)
    (folder / "..data_tmp").symlink_to(new.name)
    (folder / "..data_tmp").rename(folder / "..data")
    shutil.rmtree(old)
    load_artifact(folder, verify_hashes=True)


@pytest.mark.parametrize("name", ["model.onnx", MANIFEST_NAME, "chat_template.jinja"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    folder = write_tiny_artifact(tmp_path / "artifact")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ArtifactError):
        load_artifact(folder, verify_hashes=True)


@pytest.mark.parametrize("device", ["/dev/zero", "/proc/self/environ", "/proc/self/cwd/x", "/dev/stdin"])
def test_devices_and_processes_are_not_reached(tmp_path: Path, device: str) -> None:
    for folder, name in (
        (write_tiny_artifact(tmp_path / "a"), MANIFEST_NAME),
        (write_tiny_artifact(tmp_path / "b"), "tokenizer.json"),
    ):
        (folder / name).unlink()
        (folder / name).symlink_to(device)
        with pytest.raises(ArtifactError):
            load_artifact(folder)


@pytest.mark.parametrize("swapped", ["file", "folder"])
def test_a_link_that_appears_after_the_check_is_not_followed(
    tmp_path: Path, swapped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, secret = tmp_path / "folder", tmp_path / "secrets"
    (folder / "sub").mkdir(parents=True)
    secret.mkdir()
    (folder / "sub" / "file").write_text("ours")
    (secret / "file").write_text("theirs")

    def checked_then_changed(path: Path, inside: Path) -> Path:
        real = real_file(path, inside)
        if swapped == "file":
            path.unlink()
            path.symlink_to(secret / "file")
        else:
            path.parent.rename(tmp_path / "away")
            (folder / "sub").symlink_to(secret)
        return real

    monkeypatch.setattr(links, "real_file", checked_then_changed)
    with pytest.raises(OSError):
        open_inside(folder / "sub" / "file", folder)


@pytest.mark.parametrize("swapped", ["file", "folder"])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_weights_are_not_read_through_a_link_that_appears_during_an_export(
    tmp_path: Path, swapped: str, kind: str
) -> None:
    if kind == "gguf":
        (tmp_path / "m").mkdir()
        path = write_gguf(tmp_path / "m" / "m.gguf")
    else:
        path = write_hf_folder(tmp_path / "m") / "model.safetensors"
    tensor = open_checkpoint(str(path if kind == "gguf" else path.parent)).tensors["model.norm.weight"]
    shutil.copytree(tmp_path / "m", tmp_path / "secrets")
    if swapped == "file":
        path.unlink()
        path.symlink_to(tmp_path / "secrets" / path.name)
    else:
        path.parent.rename(tmp_path / "away")
        path.parent.symlink_to(tmp_path / "secrets")
    with pytest.raises(ArtifactError, match="cannot be read"):
        tensor.load()


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    folder = write_tiny_artifact(tmp_path / "artifact")
    os.mkfifo(folder / "fifo")
    before = psutil.Process().num_fds()
    for name in ("fifo", "absent", "model.onnx"):
        with contextlib.suppress(OSError):
            open_inside(folder / name, folder).close()
    assert psutil.Process().num_fds() == before


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a file that nobody has got yet
def test_an_interrupt_at_any_moment_of_opening_stays_one(tmp_path: Path) -> None:
    """Not an error of a handle that was closed twice, which others might have by then."""
    file = tmp_path / "weights"
    file.write_bytes(b"x")
    for moment in itertools.count(1):
        left = moment

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if left == 0:
                left = -1
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            open_real(file).close()
        except KeyboardInterrupt:
            continue
        finally:
            sys.settrace(before)
        break
    assert moment > 20
