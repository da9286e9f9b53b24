"""Tiny checkpoints packed by a maker of one matrix's parts, whatever the format.

A maker draws codes and scales of a matrix at random and returns what a tool would store for it, and the
values by the format's definition, computed with numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from support.builders.packed_checkpoints import Packed, linear_names, start

Parts = dict[str, npt.NDArray[Any]]
Made = tuple[Parts, npt.NDArray[np.float32]]
Maker = Callable[[tuple[int, int], np.random.Generator], Made]


def write_packed(
    path: Path,
    overrides: dict[str, Any],
    maker: Maker,
    settings: Mapping[str, object],
    *,
    skip: tuple[str, ...] = (),
) -> Packed:
    """Write a folder whose matrices are made by ``maker``. settings: its ``quantization_config``; skip: parts
    of names of modules that stay plain.
    """
    packed = start(path, overrides)
    rng = np.random.default_rng(11)
    for name in linear_names(packed.values):
        if any(part in name for part in skip):
            continue
        rows, columns = packed.values[name].shape
        del packed.stored[name]
        parts, packed.values[name] = maker((rows, columns), rng)
        packed.stored |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
    packed.config["quantization_config"] = dict(settings)
    packed.rewrite()
    return packed


def width_of(columns: int) -> float:
    """Return how large the weights of a tiny model are, by the number of inputs."""
    return 1 / float(np.sqrt(columns))
