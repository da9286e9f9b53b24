"""How much memory the CPU's plain attention kernel takes for scores, and how a call is kept from taking too
much.

That kernel holds a score for every head, row and position of the cache's capacity, whatever the sequence's
length. The one that works in tiles holds a few; the runtime has it for some graphs alone.
"""

from __future__ import annotations

from typing import Final

from llorch_serve.artifact.manifest import Manifest
from llorch_serve.config import DEFAULT_PREFILL_CHUNK
from llorch_serve.runtime.graph_choice import GraphChoice

MOST_BYTES: Final = 2**28
"""Bytes of scores that the plain kernel may hold at once."""

_SCORE_BYTES: Final = 4
_ROWS: Final = 32
"""Rows that a call is cut into multiples of; see :func:`llorch_serve.engine.chunking.chunk_length`."""


def plain_fits(manifest: Manifest, *, rows: int, context: int) -> bool:
    """Tell whether the plain kernel holds little enough. rows: tokens of a call, of all its sequences.
    context: tokens that a slot may hold.
    """
    return rows * _row_bytes(manifest, context) <= MOST_BYTES


def most_rows(manifest: Manifest, graphs: GraphChoice, context: int) -> int | None:
    """Return the most tokens of one sequence that a call may have; None: any number, as the kernel in tiles
    takes them, or the plain one holds little enough of a whole sequence.

    The kernel in tiles has neither soft caps nor sinks, and computes in float32 alone. Where it could, the
    plain one is chosen all the same for prompts of :data:`DEFAULT_PREFILL_CHUNK` that fit; longer chunks may
    be asked for.
    """
    form, compute_type = manifest.model.form, manifest.recipe.compute_type
    tiled = form.attention_softcap is None and not form.sinks and compute_type == "float32"
    if tiled and not (
        (graphs.prompts is not None or graphs.int8_cache is not None)
        and plain_fits(manifest, rows=DEFAULT_PREFILL_CHUNK, context=context)
    ):
        return None
    if plain_fits(manifest, rows=context, context=context):
        return None
    return max(MOST_BYTES // _row_bytes(manifest, context) // _ROWS, 1) * _ROWS


def _row_bytes(manifest: Manifest, context: int) -> int:
    return _SCORE_BYTES * manifest.model.num_attention_heads * context
