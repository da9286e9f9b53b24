"""The recipes that are tried: those that are shipped, and steps away from any of them.

A step changes one thing of a recipe (a key of ``[defaults]``, or all rules) to a value that another shipped
recipe has, or that stands next to it in the exporter's own tables, or the most prompt tokens that a worker
takes into one step. So what comes into those tables is tried without a word here. What a step means for the
model is resolved without reading a weight; steps that are refused, or that come to a recipe that is known
already, are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

from llorch_export.calibration.measurements import measured_moments
from llorch_export.checkpoint.base import Checkpoint
from llorch_export.checkpoint.names import parameters
from llorch_export.formats.module import per_channel
from llorch_export.formats.precisions import UNQUANTISED
from llorch_export.options import ExportOptions, Rule
from llorch_export.recipes.default import MOST_MEASURED, default_recipe
from llorch_export.recipes.file import RecipeDefaults, RecipeFile, load_recipe, shipped_recipes
from llorch_export.recipes.storage_defaults import BLOCK_SIZES, TRANSFORMS
from llorch_export.recipes.written import recipe_text
from llorch_export.resolved import check_source, resolve, with_packed_defaults
from llorch_serve.artifact.manifest import Activations, KvDtype, Recipe, TransformName
from llorch_serve.config import DEFAULT_PREFILL_CHUNK
from llorch_serve.errors import UsageError

_BYTE_PRODUCTS: Final = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"})
"""CPU features with which products of bytes are exact and fast; without any of them the runtime multiplies
per-channel int8 by its slow, exact kernels.
"""

PREFILL_CHUNKS: Final = (128, DEFAULT_PREFILL_CHUNK, 512)
"""Most prompt tokens in one step that are tried."""

_CACHES: Final[tuple[KvDtype, ...]] = ("int8", "float32")  # the CPU's graphs have no others


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe to try.

    label: unlike every other's. limit: the divergence in nats that recipes of its kind may have; a guess of
    how far it is, before it is measured. prefill_chunk: most prompt tokens in one step, which is the worker's
    to know and in no artifact.
    """

    label: str
    recipe: RecipeFile
    limit: float = 0.0
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK

    @property
    def key(self) -> str:
        """Names what is run: an artifact, and how many prompt tokens at a time."""
        usual = self.prefill_chunk == DEFAULT_PREFILL_CHUNK
        return self.artifact_key if usual else f"{self.artifact_key}-{self.prefill_chunk}"

    @property
    def artifact_key(self) -> str:
        """Names what is exported: the same for recipes that say the same in the same words."""
        plain = replace(self.recipe, description="", defaults=replace(self.recipe.defaults, kl_limit=None))
        return hashlib.sha256(recipe_text(plain).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Step:
    """One change of a recipe, or of the worker's ``prefill_chunk`` (None: none). words: what follows the
    recipe's name in the label.
    """

    words: str
    recipe: RecipeFile
    prefill_chunk: int | None = None


class Candidates:
    """Gives every recipe once, whoever asks.

    checkpoint: only its headers are read. features: of this CPU, as ``llorch doctor`` names them.
    prompt_tokens: of each prompt that is run; steps of more tokens than that change nothing.
    """

    def __init__(self, checkpoint: Checkpoint, features: Iterable[str], prompt_tokens: int) -> None:
        self._checkpoint = checkpoint
        self._prompt_tokens = prompt_tokens
        self._fast_bytes = not _BYTE_PRODUCTS.isdisjoint(features)
        self._shipped = {name: load_recipe(name) for name in shipped_recipes()}
        self._known: set[tuple[bytes, int]] = set()
        name = default_recipe(checkpoint.config)
        self.default = Candidate(name, self._shipped[name])
        self._is_new(self.default.recipe)

    @property
    def prompt_recipes(self) -> tuple[str, ...]:
        """The shipped recipes that are for prompts alone: those that another one names."""
        named = (recipe.defaults.prefill for recipe in self._shipped.values())
        return tuple(dict.fromkeys(name for name in named if name is not None))

    def named(self) -> list[Candidate]:
        """Return the shipped recipes and the source's own blocks, the coarsest first, as these are the
        fastest, and slow ones last; the default is not among them.
        """
        carried = RecipeFile("source", "", RecipeDefaults(precision="source"), ())
        found = {name: it for name, it in self._shipped.items() if name not in self.prompt_recipes}
        whole = {**found, carried.name: carried}
        new = {name: recipe for name, recipe in whole.items() if self._is_new(recipe)}
        kinds = {name: self._kind(recipe) for name, recipe in new.items()}
        return [
            Candidate(name, new[name], -kinds[name][-1]) for name in sorted(new, key=lambda name: kinds[name])
        ]

    def steps(self, start: Candidate) -> list[Candidate]:
        """Return what is one step away from a recipe and was not given before."""
        self._is_new(start.recipe, start.prefill_chunk)  # a step that changes nothing is none
        found = []
        for step in self._all_steps(start.recipe):
            recipe, chunk = self._with_text(step.recipe), step.prefill_chunk or start.prefill_chunk
            if recipe is not None and self._is_new(recipe, chunk):
                found.append(Candidate(f"{start.label}, {step.words}", recipe, prefill_chunk=chunk))
        return found

    def _all_steps(self, start: RecipeFile) -> Iterator[_Step]:
        yield from self._prompt_steps(start)
        yield from self._chunk_steps(start)
        yield from self._cache_steps(start)
        yield from self._rule_steps(start)
        yield from self._activation_steps(start)
        yield from _block_steps(start)
        yield from _transform_steps(start)
        yield from self._key_steps(start)

    def _prompt_steps(self, start: RecipeFile) -> Iterator[_Step]:
        for name in (None, *self.prompt_recipes):
            if name is None or self._fast_bytes:
                yield _Step(f"prompts by {name}" if name else "one graph", _with(start, prefill=name))

    def _chunk_steps(self, start: RecipeFile) -> Iterator[_Step]:
        for size in PREFILL_CHUNKS:
            yield _Step(f"prompts {size} tokens at a time", start, size)

    def _cache_steps(self, start: RecipeFile) -> Iterator[_Step]:
        for dtype in _CACHES:
            yield _Step(f"{dtype} cache", _with(start, kv_dtype=dtype))

    def _rule_steps(self, start: RecipeFile) -> Iterator[_Step]:
        for name, other in {"no": None, **self._shipped}.items():
            rules = () if other is None else other.rules
            if (other is None or rules) and self._affords(rules):
                yield _Step(
                    f"{name} rules" if other is None else f"rules of {name}", replace(start, rules=rules)
                )

    def _activation_steps(self, start: RecipeFile) -> Iterator[_Step]:
        for form in get_args(Activations):
            if self._fast_bytes or per_channel(form) is None:
                yield _Step(f"activations {form}", _with(start, activations=form))

    def _key_steps(self, start: RecipeFile) -> Iterator[_Step]:
        """Yield what other shipped recipes say in keys that no other step changes."""
        kept = {"precision", "block_size", "activations", "transforms", "kv_dtype", "kl_limit", "prefill"}
        names = [field.name for field in fields(RecipeDefaults) if field.name not in {*kept, "calibration"}]
        for name in names:
            values = {getattr(recipe.defaults, name) for recipe in self._shipped.values()} - {None}
            choices = (*sorted(values, key=str), *((0, 4) if name == "accuracy_level" else ()))
            for value in choices:
                yield _Step(f"{name.replace('_', ' ')} {value}", _with(start, **{name: value}))

    def _affords(self, rules: tuple[Rule, ...]) -> bool:
        return self._fast_bytes or all(per_channel(rule.activations) is None for rule in rules)

    def _kind(self, recipe: RecipeFile) -> tuple[bool, bool, float]:
        """Return what sorts recipes: whether weights stay as they are, which is slow; whether a large model
        is quantised by error feedback, which takes minutes; and the limit of divergence, the largest first.
        """
        resolved = self._resolved(recipe)
        assert resolved is not None, "only what can be is sorted"
        first = resolved[0]
        large = parameters(self._checkpoint.config) > MOST_MEASURED
        whole = first.precision in UNQUANTISED
        return whole, large and bool(measured_moments(first)), -first.kl_limit

    def _with_text(self, recipe: RecipeFile) -> RecipeFile | None:
        """Return the recipe as it is, or with or without a calibration text if only that makes it one that
        can be; None if it cannot be.
        """
        own = recipe.defaults.calibration
        texts: tuple[Literal["bundled"] | None, ...] = (own, None if own else "bundled")
        for text in texts:
            found = replace(recipe, defaults=replace(recipe.defaults, calibration=text))
            if self._resolved(found) is not None:
                return found
        return None

    def _is_new(self, recipe: RecipeFile, prefill_chunk: int = DEFAULT_PREFILL_CHUNK) -> bool:
        """Tell whether the recipe fits the model and comes to something that none before it came to."""
        resolved = self._resolved(recipe)
        if resolved is None:
            return False
        first, prompts, chosen = resolved
        plain = [msgspec.structs.replace(one, kl_limit=1.0) for one in (first, prompts) if one is not None]
        meaning = msgspec.json.encode([plain, chosen]), min(prefill_chunk, self._prompt_tokens)
        if meaning in self._known:
            return False
        self._known.add(meaning)
        return True

    def _resolved(self, recipe: RecipeFile) -> tuple[Recipe, Recipe | None, object] | None:
        """Return both graphs' recipes, and what rules may choose by a text; None if the recipe is refused."""
        checkpoint = self._checkpoint
        try:
            options = recipe.options(ExportOptions(source=str(checkpoint.path), output=Path(), embed="none"))
            options = with_packed_defaults(checkpoint.tensors, options, None)
            found = resolve(options, checkpoint.config)
            check_source(found.recipe, checkpoint)
        except UsageError:
            return None
        return found.recipe, found.prompts, [*found.choices, *found.prompt_choices]


def _with(start: RecipeFile, **changes: object) -> RecipeFile:
    """Return a recipe with other defaults."""
    defaults = replace(start.defaults, **changes)  # type: ignore[arg-type]  # fields of RecipeDefaults, by name
    return replace(start, defaults=defaults)


def _block_steps(start: RecipeFile) -> Iterator[_Step]:
    own = start.defaults.block_size
    near: tuple[int, ...] = BLOCK_SIZES
    if own in BLOCK_SIZES:
        at = BLOCK_SIZES.index(own)
        near = tuple(size for size in BLOCK_SIZES[max(0, at - 1) : at + 2] if size != own)
    for size in near:
        yield _Step(f"blocks of {size}", _with(start, block_size=size))


def _transform_steps(start: RecipeFile) -> Iterator[_Step]:
    own = start.defaults.transforms
    for name in TRANSFORMS:
        changed: tuple[TransformName, ...]
        if name in own:
            changed, words = tuple(one for one in own if one != name), f"without {name}"
        else:
            changed, words = (*own, name), f"with {name}"
        yield _Step(words, _with(start, transforms=changed))
