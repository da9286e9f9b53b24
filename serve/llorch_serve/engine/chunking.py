"""How many tokens of a prompt go into one step while running sequences wait for theirs.

Attention over a token costs more the further on it stands, so chunks of one length take longer and longer.
While sequences run, a chunk is made shorter, so that each takes about as long as one at the beginning.
"""

from __future__ import annotations

import math
from typing import Final

from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.engine.sequence import Sequence

_ATTENTION_COST: Final = 3.0
"""Time of a multiply-add of attention, in float32, over one of a linear layer in int8: 2.9 on two cores with
AVX-512 VNNI (SmolLM2-135M: chunks of 256 take 131 ms at position 0 and 604 ms at 3,840).
"""

STEP: Final = 32
"""Chunks that are shortened are multiples of it, as the attention kernel's blocks of rows are; rounded up,
since short ones lose speed.
"""


_ROW_BLOCK: Final = 32
"""The attention kernel's blocks of query rows are multiples of this; how large depends on head size and
processor. A row that is left over is computed by another kernel, whose last bits differ.
"""


def attention_crossover(config: LlamaConfig) -> int:
    """Return the position from which attention takes as long as all the rest of a layer."""
    heads = config.num_attention_heads * config.head_dim
    projections = config.hidden_size * (
        2 * heads + 2 * config.num_key_value_heads * config.head_dim + 3 * config.active_intermediate_size
    )
    return max(1, int(projections / (2 * heads * _ATTENTION_COST)))


def shortened(chunk: int, start: int, crossover: int) -> int:
    """Return the tokens from ``start`` on that take about as long as ``chunk`` tokens at the beginning."""
    if chunk <= STEP:
        return chunk
    steps = math.ceil(chunk / (1 + start / crossover) / STEP)
    return min(chunk, steps * STEP)


def chunk_length(sequence: Sequence, most: int) -> int:
    """Return how many tokens of a prompt, at most ``most``, go into the next step."""
    # A row's last bits depend on whether it runs alone or with other rows of its sequence. So that a
    # recomputed answer repeats the first one exactly, its tokens go one by one here too.
    start = sequence.cache.computed
    rest = sequence.prompt_length - start
    count = min(most, rest) if rest > 0 else 1
    if sequence.prompt_scores is not None:
        count = sequence.prompt_scores.limit(start, count)
    # Neither a chunk's rest nor a chunk may leave a single row for the attention kernel.
    while count > 2 and (rest - count == 1 or count % _ROW_BLOCK == 1):
        count -= 1
    return count
