"""Drives the two graphs of an artifact of fixed shapes, by the rules of docs/targets.md and nothing else of llorch's.

The past is kept here, in numpy: full from the start, empty positions hidden by the bias.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnxruntime

from llorch_serve.artifact import Artifact
from tiny_exports import Logits

HIDDEN = -10_000.0  # what a score must not survive, and float16 still holds
GARBAGE = 3.0  # in positions of the past that were never written: must not show


class FixedShapes:
    """One sequence on an artifact of fixed shapes."""

    def __init__(self, artifact: Artifact) -> None:
        manifest = artifact.manifest
        assert manifest.fixed_shapes is not None
        self.chunk = manifest.fixed_shapes.prefill_tokens
        self._manifest = manifest
        self._dtype = np.dtype(manifest.kv.dtype)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._sessions = {
            tokens: onnxruntime.InferenceSession(
                str(artifact.folder / name), options, providers=["CPUExecutionProvider"]
            )
            for tokens, name in ((1, manifest.graph), (self.chunk, manifest.fixed_shapes.prefill_graph))
        }
        kv = manifest.kv
        shape = (1, kv.kv_heads, manifest.context_length, kv.head_dim)
        self._past = {
            (layer, kind): np.full(shape, GARBAGE, self._dtype)
            for layer in range(kv.layers)
            for kind in ("key", "value")
        }

    def run(self, token_ids: Sequence[int], start: int, *, tokens: int, wanted: int) -> Logits:
        """Run ``token_ids`` at positions ``start`` and on through the graph of ``tokens`` tokens, padded to its size.

        Returns the logits [vocabulary] of ``token_ids[wanted]``.
        """
        count, context = len(token_ids), self._manifest.context_length
        ids, positions = np.zeros((2, 1, tokens), np.int64)
        ids[0, :count] = token_ids
        positions[0, :count] = np.arange(start, start + count)
        feeds: dict[str, npt.NDArray[np.generic]] = {
            "input_ids": ids,
            "position_ids": positions,
            "logits_indices": np.array([wanted]),
        }
        names = {spec.name for spec in self._manifest.inputs}
        for name, window in (("attention_bias", None), ("window_bias", self._manifest.model.sliding_window)):
            if name in names:
                feeds[name] = self._bias(start, tokens, window)
        kv = self._manifest.kv
        for (layer, kind), past in self._past.items():
            feeds[kv.past_name.format(layer=layer, kind=kind)] = past
        session = self._sessions[tokens]
        outputs = [output.name for output in session.get_outputs()]
        found = dict(zip(outputs, session.run(None, feeds), strict=True))
        room = min(count, context - start)
        for (layer, kind), past in self._past.items():
            new = found[kv.present_name.format(layer=layer, kind=kind)]
            past[:, :, start : start + room] = new[:, :, :room]
        logits: Logits = found["logits"][0]
        return logits

    def _bias(self, start: int, tokens: int, window: int | None) -> npt.NDArray[np.generic]:
        """Return [1, 1, tokens, context + tokens]: zero where a token sees."""
        context = self._manifest.context_length
        columns = np.concatenate([np.arange(context), start + np.arange(tokens)])
        written = np.concatenate([np.arange(context) < start, np.ones(tokens, bool)])
        rows = (start + np.arange(tokens))[:, None]
        sees = written & (columns <= rows)
        if window is not None:
            sees &= columns > rows - window
        return np.where(sees, 0, HIDDEN).astype(self._dtype)[None, None]
