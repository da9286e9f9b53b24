"""Exporting a checkpoint from Python, as ``llorch export`` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from llorch.settings import check_names
from llorch_serve.artifact.manifest import (
    Activations,
    ComputeType,
    Interop,
    KvDtype,
    Precision,
    Quantizer,
    ScaleType,
    Target,
    TransformName,
)
from llorch_serve.terminal.requirements import required

if TYPE_CHECKING:
    from llorch_export.pipeline import ExportResult


class ExportSettings(TypedDict, total=False):
    """What ``llorch export`` takes as flags of these names; what is left out is what it takes by itself."""

    precision: Precision
    head_precision: Precision
    block_size: int
    fine_block_size: int
    accuracy_level: Literal[0, 4]
    quantizer: Quantizer
    scale_type: ScaleType
    max_context: int
    force: bool
    if_changed: bool
    calibration: str | PathLike[str]
    transforms: Sequence[TransformName]
    interop: Interop
    compute_type: ComputeType
    target: Target
    kv_dtype: KvDtype
    kl_limit: float
    activations: Activations
    embed: Literal["last", "mean", "none"]
    stages: int | str


def export(
    source: str | PathLike[str],
    output: str | PathLike[str],
    *,
    recipe: str | PathLike[str] | None = None,
    prefill_recipe: str | PathLike[str] | None = None,
    lora: Sequence[str] = (),
    progress: Callable[[str, int, int], None] | None = None,
    **settings: Unpack[ExportSettings],
) -> ExportResult:
    """Export a GGUF file, a Hugging Face folder or a hub's repository to an artifact folder.

    recipe: a name, or a TOML file; None: the model's own default where no setting says how weights are
    stored. prefill_recipe: of a graph for prompts; ``none`` leaves out the one that ``recipe`` brings.
    lora: adapters as ``--lora`` takes them. progress: called with what is done, and how much of how many
    bytes. Returns what came out, with its notices. Raises ArtifactError, UsageError, ResourceError or
    HubError; then nothing is left behind.
    """
    check_names(settings, ExportSettings)
    with required("export"):
        from llorch_export.adapter.choice import parse_choices
        from llorch_export.graph.stage_choice import parse_stages
        from llorch_export.options import ExportOptions
        from llorch_export.pipeline import export as run
        from llorch_export.recipes.default import unasked_recipe
        from llorch_export.recipes.file import with_recipes
    given: dict[str, Any] = dict(settings)
    if "calibration" in given:
        given["calibration"] = Path(given["calibration"])
    if "stages" in given:
        given["stages"] = parse_stages(str(given["stages"]))
    given["transforms"] = tuple(given.get("transforms", ()))
    options = ExportOptions(fspath(source), Path(output), lora=parse_choices(tuple(lora)), **given)
    chosen = unasked_recipe(options) if recipe is None else fspath(recipe)
    options = with_recipes(options, chosen, None if prefill_recipe is None else fspath(prefill_recipe))
    return run(options, progress or _silent)


def _silent(_what: str, _done: int, _total: int) -> None:
    """Tell nobody how far it is."""
