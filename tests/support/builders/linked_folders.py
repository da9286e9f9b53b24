"""Folders whose files are links, laid out as the Hugging Face hub's cache and as Kubernetes volumes do."""

from __future__ import annotations

import shutil
from pathlib import Path


def as_hub_snapshot(files: Path, cache: Path, *, inner: str = "") -> Path:
    """Move the files of a folder into a hub cache and return its snapshot, or the folder ``inner`` in it."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    (repository / "blobs").mkdir(parents=True)
    place = snapshot / inner if inner else snapshot
    place.mkdir(parents=True)
    for number, path in enumerate(sorted(files.iterdir())):
        blob = repository / "blobs" / f"{number:064x}"
        path.rename(blob)
        up = len(place.relative_to(repository).parts)
        (place / path.name).symlink_to(Path(*[".."] * up, "blobs", blob.name))
    return place


def as_volume(files: Path, volume: Path, *, inner: str = "") -> Path:
    """Move the files of a folder into a Kubernetes volume and return the folder that has them as links."""
    version = volume / "..2026_11_29_10_00_00.123456789"
    version.mkdir(parents=True)
    (volume / "..data").symlink_to(version.name)
    content = version / inner if inner else version
    shutil.move(files, content) if inner else shutil.copytree(files, content, dirs_exist_ok=True)
    for path in sorted(version.iterdir()):
        (volume / path.name).symlink_to(Path("..data", path.name))
    return volume / inner if inner else volume


def as_folder_beside_a_volume(files: Path, volume: Path, name: str) -> Path:
    """Return a real folder in a Kubernetes volume whose files are links into the volume's data."""
    as_volume(files, volume)
    (volume / name).mkdir()
    for path in sorted((volume / "..data").iterdir()):
        (volume / name / path.name).symlink_to(Path("..", "..data", path.name))
    return volume / name
