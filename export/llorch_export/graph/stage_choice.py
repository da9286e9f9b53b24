"""``--stages N[,at=L1,L2...]``: how many graphs a model becomes, and before which layers it is cut."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from llorch_serve.errors import UsageError

MOST: Final = 100
_FORM: Final = re.compile(r"([0-9]{1,9})(?:,at=([0-9]{1,9}(?:,[0-9]{1,9})*))?")


@dataclass(frozen=True, slots=True)
class StageChoice:
    """What was asked for. cuts: the layers that stages but the first begin with; None: by their weights."""

    count: int
    cuts: tuple[int, ...] | None = None

    def __str__(self) -> str:
        """Return it as the flag has it."""
        cuts = "" if self.cuts is None else f",at={','.join(map(str, self.cuts))}"
        return f"{self.count}{cuts}"


def parse_stages(text: str | None) -> StageChoice | None:
    """Return the choice of a flag's text; None if there is none. Raises UsageError."""
    if text is None:
        return None
    found = _FORM.fullmatch(text.replace(" ", ""))
    if found is None:
        raise UsageError(
            f"--stages is {text[:100]!r}; expected a number of stages, as 2, or also the layers that they "
            "begin with, as 3,at=10,20"
        )
    count = int(found[1])
    if not 2 <= count <= MOST:
        raise UsageError(
            f"--stages is {text[:100]}; expected 2 to {MOST} stages. A model in one graph needs no --stages"
        )
    cuts = None if found[2] is None else tuple(map(int, found[2].split(",")))
    if cuts is not None and len(cuts) != count - 1:
        raise UsageError(
            f"--stages is {text[:100]}: {count} stages are cut before {count - 1} layers, and at= names "
            f"{len(cuts)}; name one for each stage but the first"
        )
    return StageChoice(count, cuts)


def check_stages(choice: StageChoice, layers: int) -> None:
    """Raise UsageError if a model of so many layers cannot be cut so."""
    if choice.count > layers:
        raise UsageError(
            f"--stages is {choice}; expected at most {layers}, as many as this model has layers: each stage "
            "has at least one"
        )
    bounds = (0, *(choice.cuts or ()), layers)
    if choice.cuts is not None and any(a >= b for a, b in pairwise(bounds)):
        raise UsageError(
            f"--stages is {choice}; expected layers from 1 to {layers - 1} in ascending order, each the "
            "first of its stage"
        )
