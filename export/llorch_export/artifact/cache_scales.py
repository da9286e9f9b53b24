"""The scales of a KV cache in int8: how far each channel of keys and values reaches, as the written graph
computes it.

Runs the artifact's own graph, whose cache is in float, on a text and on random tokens, and reads its cache.
What a rotated pair of a key's channels reaches there depends on its position, and a text has few of those.
So each key is taken to stand at every position of the context: a pair that turns all the way reaches its norm
in both channels, a slow one less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.calibration.measurements import BUNDLED_TEXT
from llorch_export.graph.rope import inverse_frequencies
from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.cache.kv_cache import KvCache
from llorch_serve.config import SessionConfig
from llorch_serve.runtime.opening import open_session
from llorch_serve.text.tokenizer import Tokenizer

Scales = npt.NDArray[np.float32]
Angles = npt.NDArray[np.float64]

_KEY_MARGIN: Final = 1.1
"""Room over what was seen: what is beyond the range is cut off. Wider steps cost by their square, and nearly
all that a cache in int8 costs is the rounding of keys (docs/precision.md).
"""

_VALUE_MARGIN: Final = 1.25

_WINDOW: Final = 1024
_RANDOM_TOKENS: Final = 512
_CHUNK: Final = 256
_SMALLEST: Final = 1e-6  # of a scale: a channel that was never used


def calibration_texts(artifact: Artifact, ids: Sequence[int] | None) -> list[list[int]]:
    """Return the sequences to run: those of a user's text, or of the bundled one and random tokens.

    Each begins as requests do, since the first token's keys are often far from all others.
    """
    manifest = artifact.manifest
    vocabulary, window = manifest.model.vocab_size, min(_WINDOW, manifest.context_length)
    begin = manifest.bos_token_id
    first = [] if begin is None or begin >= vocabulary else [begin]
    if ids is not None:
        pieces = [list(ids[start : start + window]) for start in range(0, min(len(ids), 2 * _WINDOW), window)]
    else:
        text = BUNDLED_TEXT.read_text(encoding="utf-8")
        known = Tokenizer.load(artifact.tokenizer_path).encode(text, add_special_tokens=False)
        drawn = np.random.default_rng(0).integers(0, vocabulary, _RANDOM_TOKENS).tolist()
        pieces = [[id_ for id_ in known if id_ < vocabulary], drawn]
    return [[*first, *piece][:window] for piece in pieces]


def measure_scales(
    artifact: Artifact, texts: Sequence[Sequence[int]], progress: Callable[[int], None]
) -> Scales:
    """Return what a step of int8 is worth, [layers, 2 (keys, values), kv_heads, head_dim]; 127 steps reach
    the range.

    progress: told how many tokens were run since the last call. Raises as
        :func:`llorch_serve.runtime.session.open_session`.
    """
    manifest = artifact.manifest
    kv = manifest.kv
    longest = max(2, *(len(ids) for ids in texts))
    session = open_session(
        artifact, SessionConfig(slots=1, max_context=longest, kv_dtype=kv.dtype), lambda _report: None
    )
    cache = session.cache
    assert isinstance(cache, KvCache)  # the CPU's
    ranges = np.zeros((kv.layers, 2, kv.kv_heads, kv.head_dim), np.float32)
    for ids in texts:
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            session.prefill(0, chunk, start, ())
            progress(len(chunk))
        for layer in range(kv.layers):
            for index, kind in enumerate(("key", "value")):
                held = cache.rows(layer, kind, 0, 1)[0, :, : len(ids)]
                if kind == "key":
                    reach = _KEY_MARGIN * key_reach(held, manifest.model, layer, manifest.context_length)
                else:
                    reach = _VALUE_MARGIN * np.abs(held).max(axis=1)
                np.maximum(ranges[layer, index], reach, out=ranges[layer, index])
    scales: Scales = np.maximum(ranges / 127, np.float32(_SMALLEST))
    return scales


def key_reach(
    keys: npt.NDArray[np.generic], config: LlamaConfig, layer: int, positions: int
) -> npt.NDArray[np.float32]:
    """Return for each channel of keys [heads, tokens, head_dim] the largest magnitude [heads, head_dim] that
    it would have at any of ``positions`` positions, from 0 on.

    keys: of tokens 0, 1, 2 and so on, rotated as the cache holds them.
    """
    reach: npt.NDArray[np.float32] = np.abs(keys).astype(np.float32).max(axis=1)
    if not config.rotates(layer):
        return reach
    half = config.rotary_dim // 2
    first, second = keys[..., :half].astype(np.float64), keys[..., half : 2 * half].astype(np.float64)
    speed = inverse_frequencies(config.ropes[config.rope_index(layer)], config.head_dim).astype(np.float64)
    start = np.arctan2(second, first) - np.arange(keys.shape[1])[:, None] * speed
    turn, norm = speed * (positions - 1), np.hypot(first, second)
    reach[:, :half] = (norm * _largest_cosine(start, turn)).max(axis=1)
    reach[:, half : 2 * half] = (norm * _largest_cosine(start - math.pi / 2, turn)).max(axis=1)
    return reach


def _largest_cosine(start: Angles, turn: Angles) -> Angles:
    """Return the largest magnitude of the cosine of any angle from ``start`` to ``start + turn``."""
    crosses = np.floor((start + turn) / math.pi) != np.floor(start / math.pi)
    ends = np.maximum(np.abs(np.cos(start)), np.abs(np.cos(start + turn)))
    return np.where(crosses, 1.0, ends)
