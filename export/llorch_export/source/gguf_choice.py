"""Which GGUF file of several is meant: by its quantisation, as ``Q4_K_M``, or by its path.

Input are the paths of a repository or folder, with sizes; output are the files of one model: one, or all
parts of a split one, the first part first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Final

from llorch_serve.errors import ArtifactError

_LABEL: Final = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|FP?16|FP?32))(?=[-._]|$)",
    re.IGNORECASE,
)
_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
_PROJECTOR: Final = "mmproj"
_SHOWN: Final = 24


def quantisation(path: str) -> str | None:
    """Return the quantisation that a file's name tells, in capitals, or None."""
    found = _LABEL.findall(_model_name(path))
    return found[-1].upper() if found else None


def choose(sizes: Mapping[str, int | None], choice: str | None, where: str) -> tuple[str, ...]:
    """Return the paths of the model that is meant, its first part first.

    sizes: of each GGUF file, in bytes, where known.
    choice: a quantisation or the path of a file; None takes the only model there is.
    where: the repository or folder, for errors.
    Raises ArtifactError with the models that there are if none or several are meant, or parts are missing.
    """
    models = _models(sizes)
    if choice is None:
        meant = list(models)
    else:
        named = [name for name, paths in models.items() if choice in paths]
        meant = named or [name for name in models if quantisation(name) == choice.upper()]
    if len(meant) == 1:
        return _all_parts(models[meant[0]], where)
    listed = _listed(models, sizes)
    if choice is None and models:
        raise ArtifactError(
            f"{where} has {len(models)} GGUF models: {listed}; choose one as in {where}:"
            f"{quantisation(next(iter(models))) or next(iter(models.values()))[0]}"
        )
    if meant:
        several = ", ".join(models[name][0] for name in meant)
        raise ArtifactError(
            f"{where} has {len(meant)} GGUF models that {choice} names: {several}; give a path"
        )
    if not models:
        raise ArtifactError(f"{where} has no GGUF file of a language model; choose another")
    raise ArtifactError(f"{where} has no GGUF model {choice}; it has {listed}")


def _models(sizes: Mapping[str, int | None]) -> dict[str, list[str]]:
    """Return the parts of each model by its path without the number of the part; projectors are none."""
    models: dict[str, list[str]] = {}
    for path in sorted(sizes):
        if path.endswith(".gguf") and _PROJECTOR not in PurePosixPath(path).name:
            name = str(PurePosixPath(path).with_name(f"{_model_name(path)}.gguf"))
            models.setdefault(name, []).append(path)
    return models


def _model_name(path: str) -> str:
    stem = PurePosixPath(path).name.removesuffix(".gguf")
    part = _PART.fullmatch(stem)
    return stem if part is None else part[1]


def _all_parts(paths: list[str], where: str) -> tuple[str, ...]:
    part = _PART.fullmatch(PurePosixPath(paths[0]).name.removesuffix(".gguf"))
    if part is None:
        return tuple(paths)
    numbers = [int(match[2]) for path in paths if (match := _PART.search(path))]
    if numbers != list(range(1, int(part[3]) + 1)):
        raise ArtifactError(
            f"{where} has parts {', '.join(map(str, numbers[:_SHOWN]))} of {paths[0]}, expected all of 1 to "
            f"{int(part[3])}; choose another"
        )
    return tuple(paths)


def _listed(models: Mapping[str, list[str]], sizes: Mapping[str, int | None]) -> str:
    """Return the models with their sizes, as ``Q4_K_M (0.8 GB)``; by path where names tell none."""
    labels = [quantisation(name) for name in models]
    shown = []
    for (_, paths), label in zip(models.items(), labels, strict=True):
        known = [size for path in paths if (size := sizes[path]) is not None]
        total = f" ({_size(sum(known))})" if len(known) == len(paths) else ""
        unique = label is not None and labels.count(label) == 1
        shown.append(f"{label if unique else paths[0]}{total}")
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 10**9 else f"{max(1, round(count / 1e6))} MB"
