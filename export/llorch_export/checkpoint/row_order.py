"""Rows of query and key projections in the order that the graph rotates them in: pairs half a head apart.

Some families rotate neighbouring elements of a head (2i, 2i + 1), and conversion to GGUF interleaves others
so, since ggml rotates neighbours. Scores do not depend on the order of a head's elements, so all are read in
one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from llorch_export.config.families import FAMILIES
from llorch_serve.artifact.manifest import LlamaConfig

Rows = Callable[[int, int], npt.NDArray[np.float32]]
Order = npt.NDArray[np.intp]


def row_order(name: str, config: LlamaConfig, *, gguf: bool = False) -> Order | None:
    """Return where each stored row of a tensor belongs, or None where rows are in place."""
    family = FAMILIES[config.architecture]
    if not (family.interleaved or (gguf and family.permuted)):
        return None
    if ".self_attn.q_proj." in name:
        heads = config.num_attention_heads
    elif ".self_attn.k_proj." in name:
        heads = config.num_key_value_heads
    else:
        return None
    return (np.arange(heads)[:, None] * config.head_dim + head_order(config)).reshape(-1)


def head_order(config: LlamaConfig) -> Order:
    """Return where each stored element of a head of neighbouring pairs belongs."""
    rotated = np.arange(config.rotary_dim).reshape(2, -1).T.reshape(-1)
    return np.concatenate([rotated, np.arange(config.rotary_dim, config.head_dim)])


def in_order(rows: Rows, order: Order | None) -> Rows:
    """Return what reads rows in the tensor's order, where ``rows`` reads stored ones."""
    if order is None:
        return rows
    places = np.argsort(order)

    def load(start: int, stop: int) -> npt.NDArray[np.float32]:
        # Rows move only within their head, so the stored rows that are wanted lie close together.
        stored = places[start:stop]
        first = int(stored.min())
        return rows(first, int(stored.max()) + 1)[stored - first]

    return load
