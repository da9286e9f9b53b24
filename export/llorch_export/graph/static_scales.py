"""One activation scale for all tokens of a layer's input: measured, or known from the rotation.

Takes what was measured on a text, if anything was; gives the scale that the graph holds as a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from llorch_export.calibration.measurements import Calibration
from llorch_export.quantize.channels import LARGEST

ROTATED_LARGEST: Final = 4.0
"""What code 127 stands for where nothing was measured. The basis of ``rotate`` mixes all channels, so a norm
gives values of about the normal distribution with variance 1, of which one in 16,000 lies beyond and is
cut.
"""

_SMALLEST: Final = 1e-30  # of a channel that the text never moved; its scale must not be 0


def static_scale(calibration: Calibration | None, modules: Sequence[str]) -> float:
    """Return the scale for the input that ``modules`` share: its largest magnitude, measured or known, is
    code 127.
    """
    if calibration is None:
        return ROTATED_LARGEST / LARGEST
    largest = max(float(calibration.inputs[f"{module}.weight"].absmax.max()) for module in modules)
    return max(float(np.float32(largest)), _SMALLEST) / LARGEST
