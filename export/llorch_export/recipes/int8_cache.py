"""Whether a model is run to measure a KV cache in int8 without anyone asking for it."""

from __future__ import annotations

from typing import Final

import msgspec

from llorch_export.checkpoint.names import parameters
from llorch_serve.artifact.manifest import KvDtype, LlamaConfig, Recipe

MOST_PARAMETERS: Final = 4 * 10**9
"""Of a model that is measured unasked: that takes the memory of its quantised weights."""


def affordable_cache(recipe: Recipe, asked: KvDtype | None, config: LlamaConfig) -> Recipe:
    """Return the recipe without an int8 cache if nobody asked for one and the model is large."""
    if recipe.int8_cache and asked is None and parameters(config) > MOST_PARAMETERS:
        return msgspec.structs.replace(recipe, int8_cache=False)
    return recipe


def cache_left_out(config: LlamaConfig) -> str:
    """Say that :func:`affordable_cache` has left the cache out."""
    return (
        f"no graph for a KV cache in int8 was added, since measuring a model of "
        f"{parameters(config) / 1e9:.1f} billion parameters "
        "takes the memory of all its weights; ask for it with --kv-dtype int8"
    )
