"""The down projection's input of even magnitude (as in SmoothQuant, Xiao et al. 2023): channels of up over a
scale.

The input of the down projection is silu(gate) * up, so a channel of up may be divided by what the down
projection's column is multiplied with. The scale is ``sqrt(max |m| / rms(w))``, with m the channel on the
calibration text and w the
column: half of the difficulty moves from activations into weights. Experts stay as they are.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from llorch_export.calibration.measurements import Calibration
from llorch_export.checkpoint.base import LazyTensor
from llorch_export.checkpoint.expert_names import feed_forward_blocks
from llorch_export.formats.module import is_expert
from llorch_export.transform.lazy import LayerNames, Tensors, Vector, balance, scaled_columns, scaled_rows
from llorch_serve.artifact.manifest import LlamaConfig

Float64 = npt.NDArray[np.float64]


def smooth(config: LlamaConfig, tensors: Tensors, measured: Calibration) -> Tensors:
    """Return the tensors of the same model with inputs of the down projections that are easier to round."""
    result = dict(tensors)
    for layer in range(config.num_hidden_layers):
        names = LayerNames(layer)
        for block in feed_forward_blocks(config, layer):
            down = names.weight(f"{block}.down_proj")
            if is_expert(down):
                continue  # their inputs are not measured
            scale = functools.cache(
                functools.partial(_scale, tensors[down], measured.inputs[down].absmax.astype(np.float64))
            )
            result[down] = scaled_columns(tensors[down], scale)
            for name in names.both(f"{block}.up_proj", tensors):
                result[name] = scaled_rows(tensors[name], _inverse(scale))
    return result


def _scale(weight: LazyTensor, absmax: Float64) -> Float64:
    """Return the scale of each of the down projection's columns."""
    squares = np.zeros(weight.shape[1])
    for chunk in weight.row_chunks():
        squares += np.square(chunk, dtype=np.float64).sum(axis=0)
    rms = np.sqrt(squares / weight.shape[0])
    usable = rms > 0
    return balance(np.where(usable, np.sqrt(absmax / np.where(usable, rms, 1.0)), 0.0))


def _inverse(scale: Vector) -> Vector:
    return lambda: 1 / scale()
