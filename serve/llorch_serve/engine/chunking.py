"""How many tokens of a prompt go into one step while running sequences wait for theirs.

Attention over a token costs more the further on it stands, so chunks of one length take longer and longer.
While sequences run, a chunk is made shorter, so that each takes about as long as one at the beginning.
"""

from __future__ import annotations

import math
from typing import Final

from llorch_serve.artifact.manifest import LlamaConfig

_ATTENTION_COST: Final = 3.0
"""Time of a multiply-add of attention, in float32, over one of a linear layer in int8: 2.9 on two cores with
AVX-512 VNNI (SmolLM2-135M: chunks of 256 take 131 ms at position 0 and 604 ms at 3,840).
"""

STEP: Final = 32
"""Chunks that are shortened are multiples of it, as the attention kernel's blocks of rows are; rounded up,
since short ones lose speed.
"""


def attention_crossover(config: LlamaConfig) -> int:
    """Return the position from which attention takes as long as all the rest of a layer."""
    heads = config.num_attention_heads * config.head_dim
    projections = config.hidden_size * (
        2 * heads + 2 * config.num_key_value_heads * config.head_dim + 3 * config.intermediate_size
    )
    return max(1, int(projections / (2 * heads * _ATTENTION_COST)))


def shortened(chunk: int, start: int, crossover: int) -> int:
    """Return the tokens from ``start`` on that take about as long as ``chunk`` tokens at the beginning."""
    if chunk <= STEP:
        return chunk
    steps = math.ceil(chunk / (1 + start / crossover) / STEP)
    return min(chunk, steps * STEP)
