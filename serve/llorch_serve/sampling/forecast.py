"""What rows would choose from the logits of another model, a draft of theirs, without any change of the rows.

A guess is best made as the token itself will be: by the row's own settings, and with the number that its seed
gives for that position. So two models that agree on a distribution agree on the draw from it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from llorch_serve.sampling.sampler import SamplingRow, sample_batch
from llorch_serve.sampling.selection import FloatArray

_ABSENT: Final = np.float32(-1e30)
"""The logit of a token that the draft's table lacks: finite, since the sampler refuses what is not."""


def forecast(logits: FloatArray, rows: Sequence[SamplingRow], ahead: int) -> list[int | None]:
    """Return the token that each row would choose behind ``ahead`` tokens that are not counted in it yet;
    None where nothing can be chosen from such logits.

    logits: float32 [len(rows), vocabulary of the rows]. Penalties are those of the tokens that are counted. A
    grammar is left aside, since it could not be taken back.
    """
    copies = [
        SamplingRow(
            row.params,
            row.processors,
            row.draws,
            generated=row.generated + ahead,
            drawable=row.drawable,
        )
        for row in rows
    ]
    return [token if isinstance(token, int) else None for token in sample_batch(logits, copies)]


def fitted(logits: FloatArray, vocab_size: int) -> FloatArray:
    """Return logits of a draft [rows, its vocabulary] as ones of a model of another vocabulary's size."""
    rows, width = logits.shape
    if width >= vocab_size:
        return logits[:, :vocab_size]
    wider = np.full((rows, vocab_size), _ABSENT, np.float32)
    wider[:, :width] = logits
    return wider
