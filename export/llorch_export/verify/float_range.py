"""A look at the activations of a float16 artifact before it is handed out: do they stay in the type's range.

The exporter runs the graph that it has just written on one short prompt, with every inner value as an output,
so that each has been rounded to float16 as on a device that computes in it. Weights that fit say nothing
about sums of them: the residual stream of some models grows beyond 65,504 in the middle layers. A prompt is a
sample: what it does not reach, the worker still refuses to sample from.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import psutil

from llorch_export.graph.half_precision import OTHER_TYPES
from llorch_export.verify.layers.graph import run_observed
from llorch_export.verify.sample_tokens import token_ids
from llorch_serve.artifact.folder import Artifact
from llorch_serve.errors import ArtifactError, ProviderError
from llorch_serve.providers import usable_cpus

_TOKENS: Final = 64
_LIMIT: Final = float(np.finfo(np.float16).max)
_NARROW: Final = 0.5
"""Part of the range beyond which the largest value is worth a notice."""

_MEMORY_FACTOR: Final = 4
"""Memory of a run over the size of the files: the weights, the same in float32, and buffers (3.4 were
measured).
"""


def probe_activations(artifact: Artifact) -> str | None:
    """Run a float16 artifact on a short text; return what a person should know, or None.

    Raises ArtifactError, naming the value, if one is not finite.
    """
    needed = _MEMORY_FACTOR * sum(entry.bytes for entry in artifact.manifest.files)
    if needed > psutil.virtual_memory().available:
        return (
            f"activations were not held against float16's range, since running the model takes "
            f"{needed / 2**30:.1f} GiB of free "
            "memory"
        )
    ids = _prompt(artifact)
    try:
        run = run_observed(artifact, ids, threads=usable_cpus(), optimised=False)
    except ProviderError as error:
        return f"activations were not held against float16's range: {error}"
    largest, where = 0.0, ""
    scores = {node.scores for node in run.attention}  # those of pairs that the mask hides are arbitrary
    for name, value in run.values.items():
        if name in scores or name not in run.half_precision:
            continue
        finite = np.isfinite(value)
        if not finite.all():
            raise ArtifactError(
                f"{name}: {int((~finite).sum())} of {value.size} values are not finite in float16, whose "
                f"largest is {_LIMIT:g}, "
                f"on a text of {len(ids)} tokens; export in another type: {OTHER_TYPES['float16']}"
            )
        peak = float(np.abs(value).max())
        if peak > largest:
            largest, where = peak, name
    if largest <= _NARROW * _LIMIT:
        return None
    return f"{where} reaches {largest:,.0f} on a short text, of the {_LIMIT:,.0f} that float16 holds"


def _prompt(artifact: Artifact) -> list[int]:
    """Return a text that begins as requests do, since the first token's values are often the largest."""
    manifest = artifact.manifest
    begin = manifest.bos_token_id
    first = [] if begin is None or begin >= manifest.model.vocab_size else [begin]
    return [*first, *token_ids(artifact)[0]][: min(_TOKENS, manifest.context_length)]
