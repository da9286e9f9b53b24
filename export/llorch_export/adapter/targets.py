"""Which modules an adapter's config means, matched as PEFT matches names.

Input are ``target_modules`` and its companions; output is whether a module is meant. Lists name modules or
their ends, strings are regular expressions, which are matched in bounded time (:mod:`.expressions`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from llorch_export.config.expressions import Expression, compiled
from llorch_export.config.fields import Fields
from llorch_export.config.notation import UnsupportedExpressionError
from llorch_serve.errors import ArtifactError

ALL_LINEAR: Final = "all-linear"
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_LAYER_LISTS: Final = ("layers", "model.layers")
_MAX_NAMES: Final = 2**14


@dataclass(frozen=True, slots=True)
class Modules:
    """Modules as a config names them: by names or their ends, or by an expression over the whole name."""

    names: frozenset[str] = frozenset()
    expression: Expression | None = None

    def __bool__(self) -> bool:
        return bool(self.names) or self.expression is not None

    def have(self, module: str) -> bool:
        """Tell whether a module is one of them."""
        if self.expression is not None:
            return self.expression.matches(module)
        return module in self.names or any(end in self.names for end in _ends(module))


@dataclass(frozen=True, slots=True)
class Targets:
    """The modules that have factors of their own.

    modules: None where the config leaves that to the file, because its expression cannot be matched here;
        ``ALL_LINEAR``: every linear layer but the head.
    saved: modules that are stored whole, which are never targets. layers: only in these; None: in all.
    """

    modules: Modules | str | None
    excluded: Modules
    saved: tuple[str, ...]
    layers: frozenset[int] | None

    def have(self, module: str) -> bool:
        """Tell whether the config means a module of the model that is linear or an embedding."""
        assert self.modules is not None, "the file says which are meant"
        if self.excluded.have(module) or any(is_within(module, name) for name in self.saved):
            return False
        if isinstance(self.modules, str):
            return module not in ("lm_head", "model.embed_tokens")
        if not self.modules.have(module):
            return False
        if self.layers is None or self.modules.expression is not None or module in self.modules.names:
            return True
        match = _LAYER.match(module)
        return match is not None and int(match[1]) in self.layers


def read_targets(
    fields: Fields, saved: tuple[str, ...], default: frozenset[str]
) -> tuple[Targets, list[str]]:
    """Return the targets, and notices of what is left to the file.

    default: what is meant where ``target_modules`` is absent. Raises ArtifactError for settings that make no
    sense.
    """
    notices: list[str] = []
    value = fields.get("target_modules")
    modules: Modules | str | None
    if isinstance(value, str) and value.lower() == ALL_LINEAR:
        modules = ALL_LINEAR
    elif value is None and default:
        modules = Modules(default)
    else:
        modules = _modules(fields, "target_modules", notices)
        if modules is not None and not modules:
            raise fields.wrong("target_modules", "names of modules, or an expression")
    excluded = _modules(fields, "exclude_modules", notices) if "exclude_modules" in fields else Modules()
    fields.get("exclude_modules")
    if excluded is None:
        modules, excluded = None, Modules()  # what is excluded is not in the file
    layers = _layers(fields, notices)
    return Targets(modules, excluded, saved, layers), notices


def _modules(fields: Fields, key: str, notices: list[str]) -> Modules | None:
    value = fields.get(key)
    if isinstance(value, str):
        try:
            return Modules(expression=compiled(value))
        except UnsupportedExpressionError as error:
            notices.append(
                f"{key} is an expression that is not matched here ({error}); what the adapter's file holds "
                f"is merged"
            )
            return None
    if not isinstance(value, list) or len(value) > _MAX_NAMES or not all(isinstance(x, str) for x in value):
        raise fields.wrong(key, "names of modules, or an expression")
    return Modules(frozenset(value))


def _layers(fields: Fields, notices: list[str]) -> frozenset[int] | None:
    """Return the layers that the adapter is for; None means all."""
    patterns = fields.get("layers_pattern")
    value = fields.get("layers_to_transform")
    if value is None or value == []:
        if patterns:
            notices.append("layers_pattern has no effect without layers_to_transform")
        return None
    items = value if isinstance(value, list) else [value]
    if not all(type(item) is int for item in items):
        raise fields.wrong("layers_to_transform", "numbers of layers")
    names = patterns if isinstance(patterns, list) else [patterns] if patterns else []
    if names and not any(_names_layers(name) for name in names):
        raise fields.wrong("layers_pattern", "'layers', as these models call them")
    return frozenset(items)


def _names_layers(pattern: object) -> bool:
    try:
        found = compiled(pattern) if isinstance(pattern, str) else None
    except UnsupportedExpressionError:
        return False
    return found is not None and any(found.matches(name) for name in _LAYER_LISTS)


def is_within(module: str, name: str) -> bool:
    """Tell whether ``name``, or a module whose end it is, is the module itself or one around it."""
    return f".{name}." in f".{module}."


@dataclass(frozen=True, slots=True)
class Pattern:
    """A key of ``rank_pattern`` or ``alpha_pattern``: an expression over a module's name or its end."""

    key: str
    expression: Expression | None

    def have(self, module: str) -> bool:
        """Tell whether the key is for a module."""
        if self.expression is None:
            return f".{module}".endswith(f".{self.key}")
        return self.expression.matches(module)


def read_pattern(key: str, origin: str) -> Pattern:
    """Return a key of ``rank_pattern`` or ``alpha_pattern``. Raises ArtifactError if it cannot be matched."""
    if re.fullmatch(r"[\w.]+", key):  # a dot stands for a dot, in all names that there are
        return Pattern(key, None)
    try:
        return Pattern(key, compiled(rf"(?:.*\.)?(?:{key})"))
    except UnsupportedExpressionError as error:
        raise ArtifactError(
            f"{origin} has {key[:80]!r}, an expression that is not matched here ({error}); write the "
            f"modules' names in its place"
        ) from error


def _ends(module: str) -> list[str]:
    """Return what stands after each dot of a name."""
    parts = module.split(".")
    return [".".join(parts[index:]) for index in range(1, len(parts))]
