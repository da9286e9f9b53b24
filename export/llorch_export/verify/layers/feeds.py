"""What a graph takes in a run from position 0, by the form of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_serve.artifact.manifest import Manifest
from llorch_serve.cache.kv_cache import KV_DTYPES

Feeds = dict[str, npt.NDArray[np.generic]]

HIDDEN: Final = -10_000.0
"""Added to scores that a token must not see; float16 holds it, and no score survives it."""


def prompt_feeds(manifest: Manifest, names: Sequence[str], token_ids: Sequence[int]) -> Feeds:
    """Return the inputs ``names`` of a run of ``token_ids`` as a whole prompt, all logits wanted where the
    graph lets one choose.

    Where shapes are fixed, those of the prefill graph, which must have room for the prompt.
    """
    count, kv = len(token_ids), manifest.kv
    if manifest.fixed_shapes is not None:
        return _fixed(manifest, names, token_ids, manifest.fixed_shapes.prefill_tokens)
    feeds: Feeds = {
        "input_ids": np.array([token_ids], np.int64),
        "seqlens_k": np.array([count - 1], np.int32),
        "total_sequence_length": np.array(count, np.int32),
        "logits_indices": np.arange(count, dtype=np.int64),
    }
    past = np.zeros((1, kv.kv_heads, count, kv.head_dim), KV_DTYPES[kv.dtype])
    return {name: feeds.get(name, past) for name in names}


def _fixed(manifest: Manifest, names: Sequence[str], token_ids: Sequence[int], tokens: int) -> Feeds:
    count, context, kv = len(token_ids), manifest.context_length, manifest.kv
    dtype = KV_DTYPES[kv.dtype]
    ids = np.zeros((1, tokens), np.int64)
    ids[0, :count] = token_ids
    own = np.arange(tokens)
    after = own[:, None] - own  # how far a token lies behind another
    window = manifest.model.sliding_window
    feeds: Feeds = {
        "input_ids": ids,
        "position_ids": own[None],
        "logits_indices": np.array([count - 1]),
    }
    for name, sees in (
        ("attention_bias", after >= 0),
        ("window_bias", (after >= 0) & (after < (window or tokens))),
    ):
        bias = np.full((1, 1, tokens, context + tokens), HIDDEN, dtype)
        bias[..., context:] = np.where(sees, 0, HIDDEN)
        feeds[name] = bias
    past = np.zeros((1, kv.kv_heads, context, kv.head_dim), dtype)
    return {name: feeds.get(name, past) for name in names}
