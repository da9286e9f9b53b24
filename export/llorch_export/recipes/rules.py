"""What a recipe's rules mean for one model: every module gets the last rule that matches it.

Takes the :class:`Rule` list of the options and the model's config; gives the recipe with :class:`ModuleRule`
entries, which name modules one by one, so that a manifest can be read without knowing patterns.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from llorch_export.formats.module import EMBEDDING, HEAD, ModuleFormat, default_format
from llorch_export.options import Rule
from llorch_export.recipes.patterns import matched_modules, matrices, share_of
from llorch_export.recipes.rule_formats import ruled_format
from llorch_serve.artifact.manifest import LlamaConfig, ModuleRule, Recipe
from llorch_serve.errors import UsageError

Peaks = Mapping[str, float]
"""By module: the largest magnitude of its inputs over their root mean square."""


def with_rules(
    recipe: Recipe, rules: tuple[Rule, ...], config: LlamaConfig, peaks: Peaks | None = None
) -> Recipe:
    """Return ``recipe`` with ``rules`` resolved for the model of ``config``.

    peaks: what ``outliers`` chooses by; None: not known yet, the first modules stand for those that it will
        be.

    Raises UsageError if a rule means no module, is overruled everywhere, or does not fit the recipe;
    ``peaks`` do not matter there.
    """
    if not rules:
        return recipe
    names = matrices(config)
    shared_table = _shares_table(recipe, config)
    matched = [(rule, matched_modules(rule, names, config.num_hidden_layers)) for rule in rules]
    _refuse_overruled(matched)
    stored = functools.partial(ruled_format, recipe, shared_table=shared_table)
    winners: dict[str, Rule] = {}
    for rule, modules in matched:
        chosen = modules
        if rule.outliers is not None:
            for module in modules:
                stored(rule, module)  # which refuses what might be chosen, too
            chosen = _with_largest_peaks(
                share_of(rule.outliers, rule.label, len(modules)), modules, peaks or {}
            )
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
    if all(rule.outliers is None for rule in rules):
        return []
    names = matrices(config)
    shared_table = _shares_table(recipe, config)
    settled: set[str] = set()  # by a later rule that takes all its modules
    found: list[tuple[int | None, Mapping[str, ModuleFormat]]] = []
    for rule in reversed(rules):
        modules = matched_modules(rule, names, config.num_hidden_layers)
        count = None if rule.outliers is None else share_of(rule.outliers, rule.label, len(modules))
        # Of those that a rule chooses among, settled ones count: they may be chosen in others' place.
        formats = {
            module: ruled_format(recipe, rule, module, shared_table=shared_table)
            for module in modules
            if count is not None or module not in settled
        }
        if count is None:
            settled.update(modules)
        if formats:
            found.append((count, formats))
    return found[::-1]


def refuse_choices_without_text(rules: Sequence[Rule], calibration: Path | None) -> None:
    """Raise UsageError if a rule chooses modules by what is measured on a text, and there is none."""
    for rule in rules:
        if rule.outliers is not None and calibration is None:
            raise UsageError(
                f"{rule.label}: spikiest chooses by what is measured on a text; add --calibration FILE"
            )


def _shares_table(recipe: Recipe, config: LlamaConfig) -> bool:
    """Tell whether head and embedding are one table; a rotation makes two of it."""
    return config.tie_word_embeddings and "rotate" not in recipe.transforms


def _refuse_overruled(matched: Sequence[tuple[Rule, list[str]]]) -> None:
    """Raise UsageError if later rules settle all that a rule matches; those that choose by a text may leave
    it any of that.
    """
    for index, (rule, modules) in enumerate(matched):
        later = {module for other, of in matched[index + 1 :] if other.outliers is None for module in of}
        if later.issuperset(modules):
            raise UsageError(f"{rule.label} has no effect: later rules settle every module that it matches")


def _with_largest_peaks(count: int, modules: list[str], peaks: Peaks) -> list[str]:
    """Return the ``count`` modules whose inputs have the largest peaks."""
    chosen = sorted(modules, key=lambda module: -peaks.get(module, 0.0))[:count]
    return [module for module in modules if module in chosen]


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
