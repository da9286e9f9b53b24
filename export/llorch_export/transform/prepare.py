"""From a checkpoint to the weights that the graph takes: measured on a text and transformed, as the recipe says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llorch_export.checkpoint.base import Checkpoint, LazyTensor
from llorch_export.transform.calibrate import calibrate
from llorch_export.transform.calibration import Calibration, CalibrationIds, measured_weights
from llorch_serve.manifest import LlamaConfig, Recipe


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the graph is built from. calibration: measured on ``tensors``; None where the graph measures nothing."""

    config: LlamaConfig
    tensors: Mapping[str, LazyTensor]
    calibration: Calibration | None


def prepare(
    checkpoint: Checkpoint,
    recipe: Recipe,
    text: CalibrationIds | None,
    progress: Callable[[str, int, int], None],
) -> Prepared:
    """Return the checkpoint's config and tensors as the recipe's transforms leave them. Raises as :func:`calibrate` does."""
    config, tensors = checkpoint.config, checkpoint.tensors
    measured = None
    if text is not None and measured_weights(recipe):
        measured = calibrate(config, tensors, text.ids, progress)
    return Prepared(config, tensors, measured)
