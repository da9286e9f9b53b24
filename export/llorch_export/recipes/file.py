"""Reading a recipe: a TOML file of the user's, or one of those next to this module by name.

Gives a :class:`RecipeFile`; what its rules mean for a model is found in ``resolve``. A file is hostile until
checked: its size and the number of its rules and patterns are bounded, and every key and value is checked.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from llorch_export.calibration.measurements import BUNDLED_TEXT, measures
from llorch_export.options import ExportOptions, Rule
from llorch_export.recipes.storage_defaults import BLOCK_SIZES
from llorch_export.source.open import open_settings
from llorch_serve.artifact.manifest import (
    Activations,
    KvDtype,
    Precision,
    Quantizer,
    ScaleType,
    TransformName,
)
from llorch_serve.errors import UsageError

_MAX_BYTES: Final = 2**16
_MAX_RULES: Final = 256
_MAX_PATTERNS: Final = 256


@dataclass(frozen=True, slots=True)
class RecipeDefaults:
    """``[defaults]``: what the flags of the same names say.

    kv_dtype: whether there is a graph over a KV cache in int8 (``int8``) or none (the compute type).
    prefill: the recipe of a graph for prompts. calibration: ``bundled`` is the short text that comes with
        llorch.
    """

    precision: Precision | None = None
    head_precision: Precision | None = None
    block_size: int | None = None
    fine_block_size: int | None = None
    quantizer: Quantizer | None = None
    scale_type: ScaleType | None = None
    accuracy_level: Literal[0, 4] | None = None
    activations: Activations | None = None
    transforms: tuple[TransformName, ...] = ()
    kv_dtype: KvDtype | None = None
    kl_limit: Annotated[float, msgspec.Meta(gt=0)] | None = None
    prefill: str | None = None
    calibration: Literal["bundled"] | None = None


@dataclass(frozen=True, slots=True)
class _RuleTable:
    """One ``[[rule]]`` as TOML has it."""

    modules: str | list[str]
    layers: str | list[str] = ()  # type: ignore[assignment]  # an empty list cannot be a dataclass's default
    precision: Precision | None = None
    block_size: int | None = None
    quantizer: Quantizer | None = None
    scale_type: ScaleType | None = None
    activations: Activations | None = None
    spikiest: str | None = None


_Kind = TypeVar("_Kind", RecipeDefaults, _RuleTable)


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A recipe as its author wrote it.

    name: as the user gave it, for messages. description: one line, may be empty.
    """

    name: str
    description: str
    defaults: RecipeDefaults
    rules: tuple[Rule, ...]

    @property
    def measures(self) -> bool:
        """Whether the recipe can use a calibration text: error feedback and a choice by peaks need one, and
        static scales may.
        """
        return (
            "gptq" in (self.defaults.quantizer, *(rule.quantizer for rule in self.rules))
            or "static" in (self.defaults.activations, *(rule.activations for rule in self.rules))
            or any(rule.outliers for rule in self.rules)
        )

    def options(self, base: ExportOptions) -> ExportOptions:
        """Return ``base`` with this recipe under it: what ``base`` leaves open comes from ``[defaults]``,
        rules are added.
        """
        given = {field.name: getattr(base, field.name) for field in fields(base)}
        for field in fields(self.defaults):
            if (
                field.name not in ("prefill", "calibration")
                and not given[field.name]
                and given[field.name] != 0
            ):
                given[field.name] = getattr(self.defaults, field.name)
        if self.defaults.calibration is not None and given["calibration"] is None:
            given["calibration"] = BUNDLED_TEXT
        found = ExportOptions(**(given | {"rules": self.rules}))
        return found if self.defaults.prefill is None else with_prefill(found, self.defaults.prefill)


def with_prefill(options: ExportOptions, name_or_path: str) -> ExportOptions:
    """Return ``options`` with a graph for prompts by a recipe, whose transforms and type are theirs.

    Raises UsageError as :func:`load_recipe`, or if that recipe asks for a third graph or for transforms.
    """
    recipe = load_recipe(name_or_path)
    if recipe.defaults.prefill is not None or recipe.defaults.transforms:
        raise UsageError(
            f"recipe {name_or_path} has transforms or a prefill recipe of its own, so it cannot be that of "
            f"prompts; "
            "their weights are transformed as the first graph's are"
        )
    if recipe.defaults.kv_dtype is not None:
        raise UsageError(
            f"recipe {name_or_path} says kv_dtype {recipe.defaults.kv_dtype}, so it cannot be that of "
            "prompts, which the first graph's cache takes; say it in that one's recipe"
        )
    base = ExportOptions(
        options.source,
        options.output,
        transforms=options.transforms,
        calibration=options.calibration if measures(options.transforms) else None,
        kv_dtype="float32",
        target=options.target,
    )
    return replace(options, prompts=recipe.options(base))


def with_recipes(options: ExportOptions, recipe: str | None, prefill: str | None) -> ExportOptions:
    """Return ``options`` with what recipes say; ``prefill`` is ``none``, or one for a graph of prompts
    alone. Raises UsageError as :func:`load_recipe`.
    """
    if recipe is not None:
        options = load_recipe(recipe).options(options)
    if prefill == "none":
        return replace(options, prompts=None)
    if prefill is not None:
        return with_prefill(options, prefill)
    if options.prompts is not None and open_settings(options.source, options.embed).embedding is not None:
        return replace(options, prompts=None)  # a graph that embeds texts takes prompts alone
    return options


def shipped_recipes() -> list[str]:
    """Return the names of the recipes that come with llorch."""
    here = resources.files(__package__)
    return sorted(
        entry.name.removesuffix(".toml") for entry in here.iterdir() if entry.name.endswith(".toml")
    )


def load_recipe(name_or_path: str) -> RecipeFile:
    """Read a shipped recipe by its name, or a file where the text ends with ``.toml`` or holds a separator.

    Raises UsageError if there is none, or it is not a recipe.
    """
    if name_or_path.endswith(".toml") or "/" in name_or_path or "\\" in name_or_path:
        return parse_recipe(_read(Path(name_or_path)), origin=name_or_path)
    shipped = shipped_recipes()
    if name_or_path not in shipped:
        raise UsageError(
            f"no recipe is called {name_or_path}{_nearest(name_or_path, shipped)}; shipped are "
            f"{', '.join(shipped)}, and a "
            "recipe of your own is a file whose name ends with .toml"
        )
    content = resources.files(__package__).joinpath(f"{name_or_path}.toml").read_bytes()
    return parse_recipe(content, origin=name_or_path)


def parse_recipe(content: bytes, *, origin: str) -> RecipeFile:
    """Parse the bytes of a recipe. Raises UsageError, which names ``origin``, the rule and the key."""
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"recipe {origin} is not TOML: {error}") from error
    _check_keys(document, ("description", "defaults", "rule", "evidence"), f"recipe {origin}")
    description = document.get("description", "")
    if not isinstance(description, str):
        raise UsageError(f"recipe {origin}: description is {description!r}, expected text")
    if not isinstance(document.get("evidence", {}), dict):  # kept for people: how a tuner came to the recipe
        raise UsageError(f"recipe {origin}: [evidence] is {document['evidence']!r}, expected a table")
    defaults = _table(document.get("defaults", {}), RecipeDefaults, f"recipe {origin}, [defaults]")
    tables = document.get("rule", [])
    if not isinstance(tables, list) or len(tables) > _MAX_RULES:
        raise UsageError(f"recipe {origin}: rules are written as [[rule]], at most {_MAX_RULES} of them")
    rules = tuple(_rule(table, f"recipe {origin}, rule {n}") for n, table in enumerate(tables, 1))
    return RecipeFile(origin, description, defaults, rules)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"recipe {path} cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise UsageError(f"recipe {path} is larger than {_MAX_BYTES} bytes, so it is not a recipe")
    return content


def _rule(table: object, label: str) -> Rule:
    found = _table(table, _RuleTable, label)
    modules, layers = _texts(found.modules), _texts(found.layers)
    if not 0 < len(modules) <= _MAX_PATTERNS or len(layers) > _MAX_PATTERNS:
        raise UsageError(f"{label}: modules and layers take 1 to {_MAX_PATTERNS} entries")
    settings = {
        "precision": found.precision,
        "block_size": found.block_size,
        "quantizer": found.quantizer,
        "scale_type": found.scale_type,
        "activations": found.activations,
    }
    if all(value is None for value in settings.values()):
        raise UsageError(f"{label} changes nothing; give it one of {', '.join(settings)}")
    if found.block_size is not None and found.block_size not in BLOCK_SIZES:
        raise UsageError(
            f"{label}: block_size is {found.block_size}; the runtime's kernels are right for "
            f"{', '.join(map(str, BLOCK_SIZES))}"
        )
    return Rule(
        modules,
        layers,
        found.precision,
        found.block_size,
        found.quantizer,
        found.scale_type,
        label=label,
        activations=found.activations,
        outliers=found.spikiest,
    )


def _texts(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _table(table: object, kind: type[_Kind], label: str) -> _Kind:
    """Check a TOML table against a dataclass. Raises UsageError."""
    if not isinstance(table, dict):
        raise UsageError(f"{label} is {table!r}, expected a table of keys and values")
    _check_keys(table, [field.name for field in fields(kind)], label)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{label}: {error}") from error


def _check_keys(table: dict[str, Any], known: Collection[str], label: str) -> None:
    for key in table:
        if key not in known:
            raise UsageError(
                f"{label} has the unknown key {key}{_nearest(key, known)}; known are {', '.join(known)}"
            )


def _nearest(word: str, known: Collection[str]) -> str:
    found = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""
