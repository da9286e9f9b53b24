"""Which modules of a model a rule names, by its patterns and its choice of layers.

Takes a :class:`Rule`, the names of the model's matrices and the number of its layers. Patterns come from
recipe files, so their length and the number of their alternatives are bounded.
"""

from __future__ import annotations

import difflib
import re
from fnmatch import fnmatchcase
from itertools import product
from typing import Final

from llorch_export.checkpoint.names import expected_tensors
from llorch_export.formats.module import HEAD, is_router
from llorch_export.options import Rule
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import UsageError

_MAX_PATTERN: Final = 500
_MAX_EXPANSIONS: Final = 1000
_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_CHOICE: Final = re.compile(r"(first|last|every) ([1-9]\d{0,3})(?:/([1-9]\d{0,3}))?")
_SHARE: Final = re.compile(r"([1-9]\d{0,3})(?:/([1-9]\d{0,3}))?")


def matrices(config: LlamaConfig) -> list[str]:
    """Return the names of all matrices that have a format, the head's too where it shares the embedding's
    table. Routers have none: they stay whole.
    """
    names = [
        name.removesuffix(".weight")
        for name, shape in expected_tensors(config).items()
        if len(shape) == 2 and not is_router(name.removesuffix(".weight"))
    ]
    return names if HEAD in names else [*names, HEAD]


def matched_modules(rule: Rule, names: list[str], layers: int) -> list[str]:
    """Return the modules that a rule means, in the model's order. Raises UsageError if a pattern means
    none.
    """
    chosen = _chosen_layers(rule, layers)
    found: set[str] = set()
    for pattern in rule.modules:
        expanded = _expanded(pattern, rule.label)
        matched = [name for name in names if any(fnmatchcase(name, plain) for plain in expanded)]
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(
                f"{rule.label}: no module matches {pattern}{hint}; this model has {names[0]}, {names[1]} to "
                f"{names[-1]}"
            )
        found.update(matched)
    if rule.layers:
        found = {name for name in found if (at := _LAYER.match(name)) and int(at[1]) in chosen}
        if not found:
            raise UsageError(
                f"{rule.label}: none of the modules it matches lies in the layers {', '.join(rule.layers)}, "
                f"of {layers}"
            )
    return [name for name in names if name in found]


def share_of(share: str, label: str, modules: int) -> int:
    """Return how many of ``modules`` a number or a share means. label: of the rule, in errors."""
    parts = _SHARE.fullmatch(share)
    if parts is None:
        raise UsageError(f"{label}: spikiest is {share!r}; expected a number like '6' or a share like '1/5'")
    count = int(parts[1])
    return max(1, modules * count // int(parts[2])) if parts[2] else count


def _expanded(pattern: str, label: str) -> list[str]:
    """Return the patterns that alternatives in braces, as ``{0,1,29}``, stand for."""
    parts = _BRACES.split(pattern)
    alternatives = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    count = 1
    for choices in alternatives:
        count *= len(choices)
    stray = any(brace in part for part in parts for brace in "{}")
    if len(pattern) > _MAX_PATTERN or count > _MAX_EXPANSIONS or stray:
        raise UsageError(
            f"{label}: the pattern {pattern[:80]} is not one of at most {_MAX_PATTERN} characters whose "
            f"braces are closed, "
            f"not nested, and give at most {_MAX_EXPANSIONS} alternatives"
        )
    return ["".join(choice) for choice in product(*alternatives)]


def _chosen_layers(rule: Rule, layers: int) -> set[int]:
    """Return the layers that a rule's ``layers`` stand for; a share of them is rounded down, but at least
    one.
    """
    chosen: set[int] = set()
    for text in rule.layers:
        parts = _CHOICE.fullmatch(text)
        if parts is None or (parts[1] == "every" and parts[3]):
            raise UsageError(
                f"{rule.label}: layers has {text!r}, expected 'first 4', 'last 4', 'first 1/8', 'last 1/8' "
                f"or 'every 3'"
            )
        number = int(parts[2])
        if parts[3]:
            number = max(1, layers * number // int(parts[3]))
        if parts[1] == "every":
            chosen.update(range(number - 1, layers, number))
        elif parts[1] == "first":
            chosen.update(range(min(number, layers)))
        else:
            chosen.update(range(max(0, layers - number), layers))
    return chosen
