"""A GGUF model that is split into files ``NAME-00001-of-0000N.gguf``, read as one.

Input is the path of any of the parts; output is one header whose tensors each know their own file. The first
part has the metadata, the others only say which part they are. All of that is untrusted: counts are held
against names, names against files, and the files must lie in the folder of the one that was given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.checkpoint.gguf_header import MAX_TENSORS, GgufHeader, GgufTensor, read_header
from llorch_export.config.fields import shown
from llorch_serve.errors import ArtifactError

_PART: Final = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
# What only the first part says, and what each part may say of itself.
_OF_A_PART: Final = frozenset({_NUMBER, _COUNT, _TENSORS, "general.alignment"})
_MAX_LISTED: Final = 8
_MAX_PARTS: Final = 2**12


def part_paths(path: Path) -> tuple[Path, ...]:
    """Return all parts of the model that ``path`` is a part of, in order; ``path`` alone if its name is no
    part's.

    Raises ArtifactError naming the parts that are missing, or if a link leads out of the folder.
    """
    match = _PART.fullmatch(path.name)
    count = 1 if match is None else int(match["count"])
    if match is None or count < 2:
        return (path,)
    folder = ModelFolder(path.parent)
    places = {name: folder.find(name) for name in _part_names(match["name"], count, path)}
    missing = [name for name, place in places.items() if place is None]
    if missing:
        more = f" and {len(missing) - _MAX_LISTED} more" if len(missing) > _MAX_LISTED else ""
        raise ArtifactError(
            f"{path} is one of {count} parts of a model, and {path.parent} lacks "
            f"{', '.join(missing[:_MAX_LISTED])}{more}; put all parts into one folder"
        )
    return tuple(place for place in places.values() if place is not None)


def one_model(paths: Iterable[Path]) -> Path | None:
    """Return the file to open if ``paths`` are one GGUF file or parts of one model; None if they are more."""
    models: dict[str, Path] = {}
    for path in sorted(paths):
        match = _PART.fullmatch(path.name)
        key = path.name if match is None else f"{match['name']}-of-{match['count']}"
        models.setdefault(key, path)
    return next(iter(models.values())) if len(models) == 1 else None


def model_stem(path: Path) -> str:
    """Return a file's name without the ending, and without the number of a part."""
    match = _PART.fullmatch(path.name)
    return path.stem if match is None else match["name"]


def read_parts(path: Path) -> GgufHeader:
    """Read and check the headers of a model's file or files; the metadata is the first part's.

    Raises ArtifactError as :func:`read_header` does, and if parts are missing or contradict each other.
    """
    paths = part_paths(path)
    first = read_header(paths[0])
    stated = _number(first, _COUNT, 1)
    if len(paths) == 1 and stated in (0, 1):
        return first
    if stated != len(paths):
        raise ArtifactError(
            f"{paths[0]} says that it is one of {stated} parts of a model, and its name says "
            f"{'that it is whole' if len(paths) == 1 else f'one of {len(paths)}'}; "
            "expected parts called NAME-00001-of-0000N.gguf: give them their names back"
        )
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(paths):
        header = first if number == 0 else read_header(part)
        _check_part(header, first, number)
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ArtifactError(
                    f"{tensors[name].path} and {part} both hold tensor {shown(name)}; they are not parts of "
                    f"one model, fetch it again"
                )
            tensors[name] = tensor
        if len(tensors) > MAX_TENSORS:
            raise ArtifactError(
                f"{paths[0]} and its parts hold more than {MAX_TENSORS} tensors; no such model is read"
            )
    _check_total(first, tensors)
    return GgufHeader(paths[0], first.metadata, tensors)


def _part_names(name: str, count: int, path: Path) -> list[str]:
    number = int(path.name.rsplit("-of-", 1)[0][-5:])
    if count > _MAX_PARTS:
        raise ArtifactError(
            f"{path} is called one of {count} parts; expected at most {_MAX_PARTS}: join them with "
            "llama-gguf-split --merge"
        )
    if not 1 <= number <= count:
        raise ArtifactError(
            f"{path} is called part {number} of {count}; expected a number from 1 to {count}: "
            "give the file its name back"
        )
    return [f"{name}-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1)]


def _number(header: GgufHeader, key: str, absent: int) -> int:
    """Return what a part says under ``key``. Raises ArtifactError if it is no number."""
    value = header.metadata.get(key, absent)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArtifactError(
            f"{header.path} has {key} as {type(value).__name__}, expected a whole number; fetch it again"
        )
    return value


def _check_part(header: GgufHeader, first: GgufHeader, number: int) -> None:
    """Hold what a part says of itself, and of the model, against its name and the first part."""
    for key, expected in ((_NUMBER, number), (_COUNT, _number(first, _COUNT, 1))):
        if (found := _number(header, key, -1)) != expected:
            said = f"says {key} {found}" if key in header.metadata else f"says nothing of {key}"
            raise ArtifactError(
                f"{header.path} {said}, expected {expected} as its name and {first.path.name} have it; it is "
                "a part of another model, or was renamed"
            )
    if number == 0:
        return
    odd = [key for key, value in header.metadata.items() if not _agrees(key, value, first.metadata)]
    if odd:
        raise ArtifactError(
            f"{header.path} says of {', '.join(key[:80] for key in odd[:_MAX_LISTED])} something else than "
            f"{first.path.name}; it is a part of another model, fetch it again"
        )


def _agrees(key: str, value: object, first: Mapping[str, object]) -> bool:
    return key in _OF_A_PART or first.get(key) == value


def _check_total(first: GgufHeader, tensors: Mapping[str, GgufTensor]) -> None:
    stated = _number(first, _TENSORS, len(tensors))
    if stated != len(tensors):
        raise ArtifactError(
            f"{first.path} says that its parts hold {stated} tensors, and they hold {len(tensors)}; "
            "fetch the model again"
        )
