"""Whether an adapter's file holds what its config says, for the model at hand.

Half a merge answers fluently, so that nobody would notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from llorch_export.adapter.files import CONFIG, AdapterFiles
from llorch_export.adapter.modules import EMBEDDING_MODULE, HEAD_MODULE, ModelModules
from llorch_export.adapter.parts import FACTORS, Part, Parts
from llorch_export.adapter.settings import AdapterSettings
from llorch_export.adapter.targets import is_within
from llorch_serve.errors import ArtifactError

_LISTED: Final = 8


def check_agreement(
    files: AdapterFiles, settings: AdapterSettings, parts: Parts, model: ModelModules
) -> None:
    """Raise ArtifactError if config, file and model do not agree on what is adapted."""
    _check_targets(files, settings, parts, model)
    _check_saved(files, settings, parts, model)


def _check_targets(files: AdapterFiles, settings: AdapterSettings, parts: Parts, model: ModelModules) -> None:
    """Compare the modules that have factors with those that the config means."""
    found = {module for module, own in parts.items() if any(part in own for part in FACTORS)}
    if settings.targets.modules is None:
        return
    candidates = model.targetable(found)
    meant = {module for module in candidates if settings.targets.have(module)}
    if settings.ties and found & {EMBEDDING_MODULE, HEAD_MODULE}:
        meant -= {EMBEDDING_MODULE, HEAD_MODULE}
        found -= {EMBEDDING_MODULE, HEAD_MODULE}
    for difference, what in ((meant - found, "lacks"), (found - meant, "has, against the config,")):
        if difference:
            listed = sorted(difference)
            raise ArtifactError(
                f"{files.weights} {what} adapters for {len(listed)} modules: {', '.join(listed[:_LISTED])}; "
                f"target_modules, exclude_modules and the layers of {CONFIG} and the base model must agree "
                f"with it. Is it the adapter of another model?"
            )
    if not found and not parts:
        raise ArtifactError(
            f"{files.weights} adapts nothing of this model; is it the adapter of another model?"
        )


def _trained_biases(settings: AdapterSettings, parts: Parts, model: ModelModules) -> set[str]:
    """Return the base model's biases that the config says were trained."""
    if settings.biases == "none":
        return set()
    biases = {name for name in model.shapes if name.endswith(".bias")}
    if settings.biases == "all":
        return biases
    adapted = (module for module, own in parts.items() if any(part in own for part in FACTORS))
    return biases.intersection(_biases(adapted, model))


def _biases(modules: Iterable[str], model: ModelModules) -> Iterator[str]:
    """Yield the names that biases of modules have."""
    return (f"{piece.module}.bias" for module in modules for piece in model.pieces(module))


def _check_saved(files: AdapterFiles, settings: AdapterSettings, parts: Parts, model: ModelModules) -> None:
    """Refuse a file without what its config says it holds: modules stored whole, biases, single tokens."""
    whole = {module for module, own in parts.items() if Part.WEIGHT in own}
    modules = {name.rpartition(".")[0] for name in model.shapes}
    for name in settings.targets.saved:
        wanted = any(is_within(module, name) for module in modules)
        tied = settings.ties and whole & {EMBEDDING_MODULE, HEAD_MODULE}
        if wanted and not tied and not any(is_within(module, name) for module in whole):
            raise ArtifactError(
                f"{files.weights} lacks the weights of {name}, which modules_to_save of {CONFIG} names; save "
                f"the adapter again"
            )
    biased = (module for module, own in parts.items() if Part.BIAS in own)
    if lost := _trained_biases(settings, parts, model) - {*_biases(biased, model)}:
        raise ArtifactError(
            f"{files.weights} lacks {len(lost)} biases that bias in {CONFIG} says were trained, "
            f"{min(lost)} among them; save the adapter again"
        )
    if settings.tokens and not any(Part.TOKENS in own for own in parts.values()):
        raise ArtifactError(
            f"{files.weights} lacks the rows that trainable_token_indices of {CONFIG} names; save the "
            f"adapter again"
        )
