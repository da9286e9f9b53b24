"""Keys of even magnitude: each key channel over a scale, the queries' channel times it, so that scores stay
the same.

A rotary pair (i, i + half) is scaled by one number, which rotation commutes with; channels that are not
rotated have their own. The scale is the largest norm that the pair had on the calibration text, over the
geometric mean of the head. With a norm over query and key heads, its weights are scaled, which all heads
share: so is the scale then.
"""

from __future__ import annotations

import numpy as np

from llorch_export.calibration.measurements import Calibration
from llorch_export.transform.lazy import LayerNames, Tensors, balance, constant, scaled_rows
from llorch_serve.artifact.manifest import LlamaConfig


def equalise(config: LlamaConfig, tensors: Tensors, measured: Calibration) -> Tensors:
    """Return the tensors of the same model with keys whose channels reach equally far on the calibration
    text.
    """
    result = dict(tensors)
    group = config.num_attention_heads // config.num_key_value_heads
    for layer in range(config.num_hidden_layers):
        names, norms = LayerNames(layer), measured.key_norm[layer].astype(np.float64)
        if config.qk_norm and config.form.qk_norm_over == "head":
            scale = balance(norms.max(axis=0))
            sides = (("self_attn.k_norm", 1 / scale), ("self_attn.q_norm", scale))
        else:
            scales = np.array([balance(head) for head in norms])
            kind = "norm" if config.qk_norm else "proj"  # a norm over all heads has a weight for each channel
            sides = (
                (f"self_attn.k_{kind}", 1 / scales.reshape(-1)),
                (f"self_attn.q_{kind}", np.repeat(scales, group, axis=0).reshape(-1)),
            )
        for module, vector in sides:
            for name in names.both(module, tensors):
                result[name] = scaled_rows(tensors[name], constant(vector))
    return result
