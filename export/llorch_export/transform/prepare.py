"""From a checkpoint to the weights that the graph takes: measured on a text and transformed, as the recipe
says.

The order of the passes is fixed: they commute, and rotation comes last because it reads matrices whole. What
the graph itself needs measured is measured on the weights that the passes leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llorch_export.calibration.measurements import (
    Calibration,
    CalibrationIds,
    measured_transforms,
    measured_weights,
)
from llorch_export.checkpoint.base import Checkpoint
from llorch_export.checkpoint.names import HEAD
from llorch_export.transform.calibrate import calibrate
from llorch_export.transform.equalise import equalise
from llorch_export.transform.hadamard import hadamard
from llorch_export.transform.lazy import Tensors, identity
from llorch_export.transform.rotate import rotate, untied
from llorch_export.transform.smooth import smooth
from llorch_serve.artifact.manifest import LlamaConfig, Recipe


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the graph is built from. calibration: measured on ``tensors``; None where the graph measures
    nothing.
    """

    config: LlamaConfig
    tensors: Tensors
    calibration: Calibration | None


def prepare(
    checkpoint: Checkpoint,
    recipe: Recipe,
    text: CalibrationIds | None,
    progress: Callable[[str, int, int], None],
    *,
    measure: bool = False,
) -> Prepared:
    """Return the checkpoint's config and tensors as the recipe's transforms leave them.

    measure: also where the recipe itself needs nothing measured on those tensors.
    Requires: a text where something is measured, and a seed where the recipe rotates.
    Ensures: the tensors compute the checkpoint's function; a calibration, if any, was measured on them.
    Raises as :func:`calibrate` does.
    """
    config, tensors = checkpoint.config, checkpoint.tensors
    if measured_transforms(recipe):
        assert text is not None, "options that measure come with a text"
        measured = calibrate(config, tensors, text.ids, progress)
        if "equalise" in recipe.transforms:
            tensors = equalise(config, tensors, measured)
        if "smooth" in recipe.transforms:
            tensors = smooth(config, tensors, measured)
    config, tensors = fixed_transforms(config, tensors, recipe, embeds=checkpoint.embedding is not None)
    again = None
    if measure or measured_weights(recipe):
        assert text is not None, "options that measure come with a text"
        again = calibrate(config, tensors, text.ids, progress)
    return Prepared(config, tensors, again)


def fixed_transforms(
    config: LlamaConfig, tensors: Tensors, recipe: Recipe, *, embeds: bool = False
) -> tuple[LlamaConfig, Tensors]:
    """Apply the recipe's transforms that measure nothing, the only ones that change what the graph looks
    like.

    embeds: the states behind the final norm are wanted, in the basis that they had; the head is then what
        brings them back to it.
    Reads no weight. Raises ArtifactError if a size has no basis.
    """
    if "hadamard" in recipe.transforms:
        tensors = hadamard(config, tensors)
    if "rotate" in recipe.transforms:
        assert recipe.transform_seed is not None, "a rotation has a seed"
        config, tensors = untied(config, tensors)
        if embeds:
            tensors = {**tensors, HEAD: identity(HEAD, config.hidden_size)}
        tensors = rotate(config, tensors, recipe.transform_seed)
    return config, tensors
