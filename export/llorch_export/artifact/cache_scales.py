"""The scales of a KV cache in int8: how far each channel of keys and values reaches, as the written graph
computes it.

Runs the artifact's own graph, whose cache is in float, on a text and on random tokens, and reads its cache. A
rotated pair of a key's channels gets one range, the largest norm of the pair: rotation keeps it, while a
single channel's range grows with positions that the text is too short for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.calibration.measurements import BUNDLED_TEXT
from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.cache.kv_cache import KvCache
from llorch_serve.config import SessionConfig
from llorch_serve.runtime.opening import open_session
from llorch_serve.text.tokenizer import Tokenizer

Scales = npt.NDArray[np.float32]

_MARGIN: Final = 1.25
"""Room over what was seen: values beyond the range are cut off, which costs far more than coarser steps
do.
"""

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
                reach = _pair_norms(held, manifest.model, layer) if kind == "key" else np.abs(held)
                np.maximum(ranges[layer, index], reach.max(axis=1), out=ranges[layer, index])
    scales: Scales = np.maximum(ranges * (_MARGIN / 127), np.float32(_SMALLEST))
    return scales


def _pair_norms(keys: npt.NDArray[np.generic], config: LlamaConfig, layer: int) -> npt.NDArray[np.float32]:
    """Return for each channel of keys [heads, tokens, head_dim] its magnitude, or its rotated pair's norm."""
    reach: npt.NDArray[np.float32] = np.abs(keys).astype(np.float32)
    if config.rotates(layer):
        half = config.rotary_dim // 2
        first, second = reach[..., :half], reach[..., half : 2 * half]
        norm = np.hypot(first, second)
        reach = np.concatenate([norm, norm, reach[..., 2 * half :]], axis=-1)
    return reach
