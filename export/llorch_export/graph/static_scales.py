"""One activation scale for all rows of a layer's input: where it comes from, and when there is one.

Takes a recipe whose rules are resolved, and what was measured on a text, if anything was; gives the scale
that the graph holds as a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from llorch_export.calibration.measurements import Calibration
from llorch_export.formats.module import NORM_READERS
from llorch_export.quantize.channels import LARGEST
from llorch_serve.artifact.manifest import Recipe
from llorch_serve.errors import UsageError

ROTATED_LARGEST: Final = 4.0
"""What code 127 stands for where nothing was measured. The basis of ``rotate`` mixes all channels, so a norm
gives values of about the normal distribution with variance 1, of which one in 16,000 lies beyond and is
cut.
"""

_SMALLEST: Final = 1e-30  # of a channel that the text never moved; its scale must not be 0


def check_static(recipe: Recipe, calibration: Path | None) -> None:
    """Raise UsageError if a layer's static scale would be a guess: no text to measure it on, and no rotation
    to know it by.

    As the whole recipe's form it needs a rotation in any case; rules may name the layers that do without.
    """
    rotated = "rotate" in recipe.transforms
    if recipe.activations == "static" and not rotated:
        raise UsageError(
            "--activations static without a rotation lets a few large channels settle the step of all (0.14 "
            "nats on "
            "SmolLM2-135M); add --transform rotate, or choose --activations row"
        )
    if calibration is not None:
        return
    for rule in recipe.rules:
        for module in rule.modules:
            if rule.activations == "static" and not (rotated and module.endswith(NORM_READERS)):
                raise UsageError(
                    f"activations static of {module}: how large its input gets is not known; add "
                    f"--calibration FILE to "
                    "measure it" + ("" if rotated else ", or choose activations row")
                )


def static_scale(calibration: Calibration | None, modules: Sequence[str]) -> float:
    """Return the scale for the input that ``modules`` share: its largest magnitude, measured or known, is
    code 127.
    """
    if calibration is None:
        return ROTATED_LARGEST / LARGEST
    largest = max(float(calibration.inputs[f"{module}.weight"].absmax.max()) for module in modules)
    return max(float(np.float32(largest)), _SMALLEST) / LARGEST
