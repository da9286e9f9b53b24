"""What a user points at is found, or refused with what would be accepted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from llorch_export.source.open import (
    fingerprint,
    fingerprint_files,
    list_content_files,
    open_checkpoint,
    open_config,
)
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import tiny_llama_config, write_gguf, write_hf_folder

REPO = "some-org/tiny-llama"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty hub cache; the hub itself cannot be reached."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("the hub is not reachable in tests")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    return cache


def _cache_snapshot(cache: Path, files: Path) -> Path:
    """Lay a folder out as the hub's cache does: blobs, and a snapshot of links into them."""
    repository = cache / f"models--{REPO.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(files.iterdir())):
        shutil.copy(path, repository / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{number:040x}"))
    return snapshot


def test_a_hub_id_is_read_from_the_cache_without_network(tmp_path: Path, hub_cache: Path) -> None:
    snapshot = _cache_snapshot(hub_cache, write_hf_folder(tmp_path / "m", shards=2))
    checkpoint = open_checkpoint(REPO)
    assert checkpoint.name == "tiny-llama"
    assert checkpoint.kind == "safetensors"
    assert checkpoint.path.resolve() == snapshot.resolve()
    assert checkpoint.tensors["model.norm.weight"].load().shape == (64,)
    assert open_config(REPO) == tiny_llama_config()


def test_a_hub_id_without_safetensors_but_one_gguf_uses_that(tmp_path: Path, hub_cache: Path) -> None:
    (tmp_path / "m").mkdir()
    write_gguf(tmp_path / "m" / "tiny.Q8_0.gguf", weight_type="Q8_0")
    _cache_snapshot(hub_cache, tmp_path / "m")
    checkpoint = open_checkpoint(REPO)
    assert (checkpoint.kind, checkpoint.name) == ("gguf", "tiny")
    assert open_config(REPO) == checkpoint.config


def test_the_config_of_a_hub_id_needs_no_weights(tmp_path: Path, hub_cache: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    _cache_snapshot(hub_cache, folder)
    assert open_config(REPO) == tiny_llama_config()


@pytest.mark.parametrize(
    "missing",
    ["model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json", "config.json", None],
)
def test_a_hub_id_that_cannot_be_had_says_why(tmp_path: Path, hub_cache: Path, missing: str | None) -> None:
    if missing is not None:
        folder = write_hf_folder(tmp_path / "m", shards=2 if missing.startswith("model-") else 1)
        (folder / missing).unlink()
        _cache_snapshot(hub_cache, folder)
    with pytest.raises(ArtifactError) as caught:
        open_checkpoint(REPO)
    message = str(caught.value)
    assert ("only partly in" if missing else "not in") in message
    assert "the hub is not reachable in tests" in message


def test_links_in_a_snapshot_may_lead_to_its_own_blobs_only(tmp_path: Path, hub_cache: Path) -> None:
    snapshot = _cache_snapshot(hub_cache, write_hf_folder(tmp_path / "m"))
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(secret)
    with pytest.raises(ArtifactError, match=r"config.json is a link that leads out of its folder"):
        open_checkpoint(str(snapshot))


@pytest.mark.parametrize(
    "source", ["nothing-here", "./no/such/folder", "missing/model.gguf", "/absent", "", "x" * 5000, "a\0b"]
)
def test_what_does_not_exist_is_refused_with_the_kinds_of_source(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match=r"expected a GGUF file, a folder .* or a hub id"):
        open_checkpoint(source)


def test_a_single_safetensors_file_asks_for_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="give the folder that holds it"):
        open_checkpoint(str(write_hf_folder(tmp_path / "m") / "model.safetensors"))


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    assert open_checkpoint(str(tmp_path)).path == path
    write_gguf(tmp_path / "n.gguf")
    with pytest.raises(ArtifactError, match=r"2 GGUF files \(m.gguf, n.gguf\)"):
        open_checkpoint(str(tmp_path))


def test_a_folder_with_a_config_only_gives_its_config(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert open_config(str(folder)) == tiny_llama_config()
    with pytest.raises(ArtifactError, match=r"holds neither model.safetensors nor"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "m.gguf", "model-00002-of-00002.safetensors", "tokenizer.json"]
)
def test_a_pointer_of_git_lfs_says_how_to_fetch_the_file(tmp_path: Path, name: str) -> None:
    folder = write_hf_folder(tmp_path / "m", shards=2 if "of" in name else 1)
    (folder / name).write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 269060552\n"
    )
    source = folder / name if name.endswith(".gguf") else folder
    with pytest.raises(ArtifactError, match=rf"{name} is a pointer of Git LFS, .*git lfs pull"):
        open_checkpoint(str(source))


def test_licence_files_travel_along(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    for name in ("LICENSE", "LICENCE.txt", "NOTICE.md", "USE_POLICY.md", "README.md", "licensed.py"):
        (folder / name).write_text("terms")
    names = [path.name for path in open_checkpoint(str(folder)).licence_files]
    assert names == ["LICENCE.txt", "LICENSE", "NOTICE.md", "USE_POLICY.md"]


def test_licence_files_beside_a_gguf_file_are_its_own_only_where_it_is_alone(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    (tmp_path / "LICENSE").write_text("terms")
    assert open_checkpoint(str(path)).licence_files == (tmp_path / "LICENSE",)
    write_gguf(tmp_path / "n.gguf")
    assert open_checkpoint(str(path)).licence_files == ()


def test_the_fingerprint_follows_the_content_of_every_file(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", shards=2, generation_config={"temperature": 0.5})
    files = list_content_files(str(folder))
    assert files == open_checkpoint(str(folder)).content_files
    assert {path.name for path in files} == {path.name for path in folder.iterdir()}
    seen = {fingerprint(open_checkpoint(str(folder)))}
    for path in files:
        changed = bytearray(path.read_bytes())
        changed[-1] ^= 1
        original = path.read_bytes()
        path.write_bytes(changed)
        seen.add(fingerprint_files(files))
        path.write_bytes(original)
    assert len(seen) == 1 + len(files)


def test_the_fingerprint_of_a_gguf_file_survives_renaming_and_reports_every_byte(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    size = path.stat().st_size
    told: list[int] = []
    first = fingerprint(open_checkpoint(str(path)), told.append)
    assert sum(told) == size
    renamed = path.rename(tmp_path / "b.gguf")
    assert fingerprint_files(list_content_files(str(renamed))) == first
    renamed.write_bytes(renamed.read_bytes() + b"x")
    assert fingerprint_files((renamed,)) != first


def test_what_is_no_file_is_no_part_of_a_fingerprint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ArtifactError, match=r"config\.json cannot be read: it is no regular file"):
        fingerprint_files([tmp_path / "config.json"])
    with pytest.raises(ArtifactError, match="absent cannot be read"):
        fingerprint_files([tmp_path / "absent"])
