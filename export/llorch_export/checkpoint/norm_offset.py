"""Norms whose weight is stored less one, as Gemma's are: read as the factor that they stand for.

The graph and all that changes weights know the factor alone. GGUF files hold it already.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.names import is_norm
from llorch_export.config.families import FAMILIES
from llorch_serve.artifact.manifest import LlamaConfig

Rows = Callable[[int, int], npt.NDArray[np.float32]]


def norm_offset(name: str, config: LlamaConfig) -> float:
    """Return what a family adds to a stored tensor of this name; 0 for all but norms' weights."""
    module, _, kind = name.rpartition(".")
    return FAMILIES[config.architecture].norm_offset if kind == "weight" and is_norm(module) else 0.0


def with_offset(name: str, config: LlamaConfig, rows: Rows) -> Rows:
    """Return what reads rows of the factor, where ``rows`` reads what is stored."""
    offset = np.float32(norm_offset(name, config))
    if not offset:
        return rows
    return lambda start, stop: rows(start, stop) + offset
