"""Which adapters to merge, and with which weight: what ``--lora DIR`` and ``--lora DIR=WEIGHT`` say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llorch_serve.errors import UsageError

_MAX_WEIGHT: Final = 1000.0


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """The folder of an adapter, and what its change of the weights is multiplied by."""

    path: Path
    weight: float = 1.0

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name


def parse_choices(texts: Sequence[str]) -> tuple[AdapterChoice, ...]:
    """Return the adapters that the command line names, in its order.

    Raises UsageError for a weight that is none or has no effect, and for a folder that is named twice.
    """
    found = tuple(_parsed(text) for text in texts)
    paths = [choice.path.resolve() for choice in found]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise UsageError(f"--lora names {path} twice; name it once, with the sum of the weights")
    return found


def _parsed(text: str) -> AdapterChoice:
    """Take ``DIR=WEIGHT`` apart. A folder whose own name ends like that is meant before it is."""
    folder, mark, number = text.rpartition("=")
    if not mark or not folder:
        return AdapterChoice(Path(text))
    if _is_folder(text):
        if _is_folder(folder) and _number(number) is not None:
            raise UsageError(
                f"--lora {text} may mean the folder {text} or {number} times the folder {folder}, and both "
                f"exist; write {text}=1 or {folder}/={number}"
            )
        return AdapterChoice(Path(text))
    weight = _number(number)
    if weight is None:
        return AdapterChoice(Path(text))  # a path that does not exist, which the reader of folders reports
    if not math.isfinite(weight) or weight == 0 or abs(weight) > _MAX_WEIGHT:
        raise UsageError(
            f"--lora {text} has weight {number}, expected a number other than 0 from -{_MAX_WEIGHT:g} to "
            f"{_MAX_WEIGHT:g}; leave an adapter without effect out"
        )
    return AdapterChoice(Path(folder), weight)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_folder(text: str) -> bool:
    try:
        return Path(text).is_dir()
    except (OSError, ValueError):  # no permission, or no possible name
        return False
