"""What a recipe's rules mean for one model: every module gets the last rule that matches it.

Takes the :class:`Rule` list of the options and the model's config; gives the recipe with :class:`ModuleRule`
entries, which name modules one by one, so that a manifest can be read without knowing patterns.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Final

import msgspec

from llorch_export.checkpoint.names import expected_tensors
from llorch_export.formats.module import EMBEDDING, HEAD, ModuleFormat, Whole, default_format, whole
from llorch_export.formats.precisions import BITS
from llorch_export.options import DEFAULT_BLOCK_SIZE, DEFAULT_QUANTIZER, DEFAULT_SCALE_TYPE, Rule
from llorch_serve.artifact.manifest import LlamaConfig, ModuleRule, Precision, Recipe
from llorch_serve.errors import UsageError

_MAX_PATTERN: Final = 500
_MAX_EXPANSIONS: Final = 1000
_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_CHOICE: Final = re.compile(r"(first|last|every) ([1-9]\d{0,3})(?:/([1-9]\d{0,3}))?")


_SHARE: Final = re.compile(r"([1-9]\d{0,3})(?:/([1-9]\d{0,3}))?")

Peaks = Mapping[str, float]
"""By module: the largest magnitude of its inputs over their root mean square."""


def with_rules(
    recipe: Recipe, rules: tuple[Rule, ...], config: LlamaConfig, peaks: Peaks | None = None
) -> Recipe:
    """Return ``recipe`` with ``rules`` resolved for the model of ``config``.

    peaks: what ``spikiest`` chooses by; None: not known yet, the first modules stand for those that it will
        be.

    Raises UsageError if a rule means no module, is overruled everywhere, or does not fit the recipe;
    ``peaks`` do not matter there.
    """
    if not rules:
        return recipe
    names = _modules(config)
    shared_table = _shares_table(recipe, config)
    matched = [(rule, _matched(rule, names, config.num_hidden_layers)) for rule in rules]
    _refuse_overruled(matched)
    stored = functools.partial(_format, recipe, shared_table=shared_table)
    winners: dict[str, Rule] = {}
    for rule, modules in matched:
        chosen = modules
        if rule.spikiest is not None:
            for module in modules:
                stored(rule, module)  # which refuses what might be chosen, too
            chosen = _spikiest(_count(rule.spikiest, rule.label, len(modules)), modules, peaks or {})
        winners |= dict.fromkeys(chosen, rule)
    formats = {module: stored(rule, module) for module, rule in winners.items()}
    if shared_table:
        _join_tables(formats, winners)
    grouped: dict[ModuleFormat, list[str]] = {}
    for module in names:
        if module in formats and formats[module] != default_format(recipe, module):
            grouped.setdefault(formats[module], []).append(module)
    return msgspec.structs.replace(
        recipe,
        rules=tuple(
            ModuleRule(
                modules=tuple(modules),
                precision=form.precision,
                block_size=form.block_size,
                quantizer=form.quantizer,
                scale_type=form.scale_type,
                activations=form.activations,
            )
            for form, modules in grouped.items()
        ),
    )


Choices = Sequence[tuple[int | None, Mapping[str, ModuleFormat]]]
"""Rules that a text decides, in order: how many modules each takes (None: all), and by module the format it
gives.
"""


def choices(recipe: Recipe, rules: Sequence[Rule], config: LlamaConfig) -> Choices:
    """Return what ``rules`` that a text decides may come to, for all texts; nothing if a text decides none.

    Lists of rules that give the same are resolved alike by :func:`with_rules`, whatever a text shows.
    """
    if all(rule.spikiest is None for rule in rules):
        return []
    names = _modules(config)
    shared_table = _shares_table(recipe, config)
    settled: set[str] = set()  # by a later rule that takes all its modules
    found: list[tuple[int | None, Mapping[str, ModuleFormat]]] = []
    for rule in reversed(rules):
        modules = _matched(rule, names, config.num_hidden_layers)
        count = None if rule.spikiest is None else _count(rule.spikiest, rule.label, len(modules))
        # Of those that a rule chooses among, settled ones count: they may be chosen in others' place.
        formats = {
            module: _format(recipe, rule, module, shared_table=shared_table)
            for module in modules
            if count is not None or module not in settled
        }
        if count is None:
            settled.update(modules)
        if formats:
            found.append((count, formats))
    return found[::-1]


def measured_choices(rules: Sequence[Rule], calibration: Path | None) -> list[Rule]:
    """Return the rules that choose modules by what is measured on a text. Raises UsageError where there is
    none.
    """
    found = [rule for rule in rules if rule.spikiest is not None]
    if found and calibration is None:
        raise UsageError(
            f"{found[0].label}: spikiest chooses by what is measured on a text; add --calibration FILE"
        )
    return found


def _modules(config: LlamaConfig) -> list[str]:
    """Return the names of all matrices, the head's too where it shares the embedding's table."""
    names = [
        name.removesuffix(".weight") for name, shape in expected_tensors(config).items() if len(shape) == 2
    ]
    return names if HEAD in names else [*names, HEAD]


def _shares_table(recipe: Recipe, config: LlamaConfig) -> bool:
    """Tell whether head and embedding are one table; a rotation makes two of it."""
    return config.tie_word_embeddings and "rotate" not in recipe.transforms


def _refuse_overruled(matched: Sequence[tuple[Rule, list[str]]]) -> None:
    """Raise UsageError if later rules settle all that a rule matches; those that choose by a text may leave
    it any of that.
    """
    for index, (rule, modules) in enumerate(matched):
        later = {module for other, of in matched[index + 1 :] if other.spikiest is None for module in of}
        if later.issuperset(modules):
            raise UsageError(f"{rule.label} has no effect: later rules settle every module that it matches")


def _matched(rule: Rule, names: list[str], layers: int) -> list[str]:
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


def _count(share: str, label: str, modules: int) -> int:
    """Return how many of ``modules`` a number or a share means. label: of the rule, in errors."""
    parts = _SHARE.fullmatch(share)
    if parts is None:
        raise UsageError(f"{label}: spikiest is {share!r}; expected a number like '6' or a share like '1/5'")
    count = int(parts[1])
    return max(1, modules * count // int(parts[2])) if parts[2] else count


def _spikiest(count: int, modules: list[str], peaks: Peaks) -> list[str]:
    """Return the ``count`` modules whose inputs have the largest peaks."""
    chosen = sorted(modules, key=lambda module: -peaks.get(module, 0.0))[:count]
    return [module for module in modules if module in chosen]


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


def _format(recipe: Recipe, rule: Rule, module: str, *, shared_table: bool) -> ModuleFormat:
    """Return what a rule makes of a module; what it leaves open is the recipe's, where that speaks of the
    same precision.

    shared_table: the head is the embedding's table, from which rows are taken.
    """
    looked_up = module == EMBEDDING or (shared_table and module == HEAD)
    default = default_format(recipe, module)
    precision = rule.precision or default.precision
    if precision == "source":
        raise UsageError(f"{rule.label}: precision source is for the whole model; choose fp32, int8 or int4")
    activations = _activations(rule, default, module, precision, looked_up=looked_up)
    if activations is not None:
        _refuse_block_settings(
            rule,
            f"with activations {activations}, where a weight's blocks are its whole rows; leave it out, or "
            f"set activations = "
            '"block"',
        )
        return ModuleFormat("int8", None, None, "float32", activations)
    if precision not in BITS:
        _refuse_block_settings(rule, f"at precision {precision}; leave it out")
        return ModuleFormat(precision, None, None, "float32")
    if precision != "int4" and rule.quantizer is not None:
        raise UsageError(
            f"{rule.label}: quantizer has no effect at precision {precision}; leave it out or choose int4"
        )
    same = precision == default.precision
    half = recipe.compute_type != "float32"
    if half and rule.scale_type not in (None, recipe.compute_type):
        raise UsageError(
            f"{rule.label}: scale_type {rule.scale_type} has no effect where the graph computes in "
            f"{recipe.compute_type}, "
            "which scales are then rounded to; leave it out"
        )
    own = recipe.scale_type if half or recipe.block_size is not None else DEFAULT_SCALE_TYPE[precision]
    return ModuleFormat(
        precision,
        rule.block_size
        or (same and (default.block_size or recipe.block_size))
        or DEFAULT_BLOCK_SIZE[precision],
        (rule.quantizer or recipe.quantizer or DEFAULT_QUANTIZER) if precision == "int4" else None,
        rule.scale_type or own,
    )


def _refuse_block_settings(rule: Rule, why: str) -> None:
    for key, value in (
        ("block_size", rule.block_size),
        ("quantizer", rule.quantizer),
        ("scale_type", rule.scale_type),
    ):
        if value is not None:
            raise UsageError(f"{rule.label}: {key} has no effect {why}")


def _activations(
    rule: Rule, default: ModuleFormat, module: str, precision: Precision, *, looked_up: bool
) -> Whole | None:
    """Return how the module's input is rounded, if by whole rows. Raises UsageError where that cannot be."""
    if rule.activations is None:
        return default.activations if precision == "int8" else None
    if precision != "int8":
        raise UsageError(
            f"{rule.label}: activations {rule.activations} is for int8, and {module} has precision "
            f"{precision}; leave out what "
            'gives it that, or say precision = "int8" in a rule of your own'
        )
    if rule.activations != "block" and looked_up:
        shared = ", and this model's head is the same table; a rotation (--transform rotate) makes two of it"
        raise UsageError(
            f"{rule.label}: activations {rule.activations} is for matrices that are only multiplied with; "
            f"{EMBEDDING} is looked up, "
            f"which takes blocks{shared if module == HEAD else ''}"
        )
    return whole(rule.activations)


def _join_tables(formats: dict[str, ModuleFormat], winners: dict[str, Rule]) -> None:
    """Let rules for the head of a tied model hold for the one table, which goes by the embedding's name."""
    if HEAD not in formats:
        return
    if formats.get(EMBEDDING, formats[HEAD]) != formats[HEAD]:
        raise UsageError(
            f"{winners[HEAD].label} and {winners[EMBEDDING].label} differ on the table that this model's "
            f"head and "
            f"embedding share; let one rule name both {EMBEDDING} and {HEAD}"
        )
    formats[EMBEDDING] = formats.pop(HEAD)
