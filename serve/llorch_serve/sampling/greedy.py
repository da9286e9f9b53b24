"""Rows whose next token is the most likely one, so that it can be chosen without looking at other logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llorch_serve.sampling.processors import applying

if TYPE_CHECKING:
    from llorch_serve.sampling.sampler import SamplingRow


def takes_best(row: SamplingRow) -> bool:
    """Return whether nothing but the logits' order decides on a row's next token."""
    return not row.params.temperature and is_plain(row)


def is_plain(row: SamplingRow) -> bool:
    """Return whether the next token's logits count as the model gave them."""
    return not (
        row.constraint is not None
        or row.generated < len(row.forced)
        or (row.processors and applying(row.processors))
    )


def accepts(row: SamplingRow, token_id: int) -> bool:
    """Return whether the most likely token of a row that takes it may be drawn. token_id: -1: there is none,
    as the logits are not all finite.
    """
    return token_id >= 0 and (row.drawable is None or token_id in row.drawable)
