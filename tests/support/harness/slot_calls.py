"""Calls on a session that move what its slots hold, for caches that must do what one in host memory does."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llorch_serve.runtime.session import DecoderSession
from support.builders.tiny_exports import random_ids


def slot_calls(session: DecoderSession) -> list[npt.NDArray[np.float32]]:
    """Return the logits of prompts, chunks, a copied and a swapped slot, steps of one to three sequences, and
    a check of a draft.

    session: of a tiny model, with three slots.
    """
    found = [
        session.prefill(0, random_ids(9), 0).copy(),
        session.prefill(1, random_ids(5, seed=2), 0, range(5)).copy(),
        session.prefill(1, random_ids(3, seed=3), 5).copy(),
        session.decode([7, 8], [10, 9]).copy(),
    ]
    session.copy_slot(0, 2, 10)
    session.swap_slots(0, 1, 10)
    found += [session.decode([1, 2, 3], [10, 11, 11]).copy(), session.verify(2, [4, 5, 6], 11).copy()]
    found += [session.decode([9], [11]).copy(), session.decode([1, 2], [12, 12]).copy()]
    return found
