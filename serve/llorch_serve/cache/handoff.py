"""The prompt under way, in the type that its graph computes in, beside a KV cache in int8.

Attention over many rows of an int8 cache is slow, and every chunk of a prompt would read what the chunks
before it were rounded to. So a prompt is computed in a cache of its own, with room for one sequence, and each
chunk's keys and values are rounded into the sequence's slot once. One prompt is under way at a time; where
another slot's prefix is taken up, what that slot holds is widened first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_serve.artifact.manifest import KvLayout
from llorch_serve.cache.kv_cache import KvCache
from llorch_serve.errors import ArtifactError

Scales = npt.NDArray[np.float32]

KEPT: Final = 2048
"""Positions whose memory the prompt's cache keeps from one prompt to the next; what a longer one has taken
beyond them goes back to the system when another begins.
"""


def read_scales(path: Path, kv: KvLayout) -> Scales:
    """Read the scales of an int8 cache, [layers, 2, kv_heads, head_dim].

    Raises ArtifactError if the file has another size, or values that are no scales.
    """
    shape = (kv.layers, 2, kv.kv_heads, kv.head_dim)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be read: {error.strerror or error}; export the model again"
        ) from error
    scales = np.frombuffer(data[: len(data) // 4 * 4], "<f4")
    if len(data) != 4 * int(np.prod(shape)) or not (np.isfinite(scales).all() and (scales > 0).all()):
        raise ArtifactError(
            f"{path} does not hold {int(np.prod(shape))} positive float32 scales; export the model again"
        )
    return scales.reshape(shape)


class Handoff:
    """Moves keys and values between the prompt's cache and the slots' int8 cache.

    prompt: a cache of one slot, with the same capacity as ``slots`` has.
    """

    def __init__(self, prompt: KvCache, slots: KvCache, scales: Scales) -> None:
        self.prompt = prompt
        self._slots = slots
        self._scales = {
            (layer, kind): scales[layer, index][:, None, :]
            for layer in range(len(scales))
            for index, kind in enumerate(("key", "value"))
        }
        self._inverse = {place: 1 / scale for place, scale in self._scales.items()}
        self._slot: int | None = None
        self._length = 0
        self._reached = 0

    def begin(self, slot: int, start: int) -> None:
        """Make the prompt's cache hold the first ``start`` positions of a slot."""
        # What the prompt's cache holds of this slot is exact, also where a sequence takes up only part of it:
        # whatever calls have written in the slot since lies behind that. So continuations of one context read
        # it as the first one did.
        goes_on = slot == self._slot and start <= self._length
        if not goes_on and self._reached > KEPT:
            self.prompt.release(0, KEPT)
            self._reached = KEPT
        if start and not goes_on:
            for (layer, kind), scale in self._scales.items():
                widened = self.prompt.rows(layer, kind, 0, 1)[0, :, :start]
                # Twice as fast as one product of the two types.
                np.copyto(widened, self._slots.rows(layer, kind, slot, 1)[0, :, :start])
                np.multiply(widened, scale, out=widened)
            self._reached = max(self._reached, start)
        self._slot, self._length = slot, start

    def end(self, stop: int) -> None:
        """Round what the prompt's cache holds from where :meth:`begin` left it up to ``stop`` into the
        slot.
        """
        assert self._slot is not None
        start = self._length
        for (layer, kind), inverse in self._inverse.items():
            steps = self.prompt.rows(layer, kind, 0, 1)[0, :, start:stop] * inverse
            np.rint(steps, out=steps)
            np.clip(steps, -128, 127, out=steps)
            target = self._slots.rows(layer, kind, self._slot, 1)[0, :, start:stop]
            np.copyto(target, steps, casting="unsafe")
        self._length = stop
        self._reached = max(self._reached, stop)

    def written(self, slot: int, start: int) -> None:
        """Forget what the prompt's cache holds of a slot from ``start`` on, where a call of running sequences
        has written.
        """
        if slot == self._slot:
            self._length = min(self._length, start)

    def overwritten(self, slot: int) -> None:
        """Forget the prompt if it was that slot's: it now holds something else."""
        if slot == self._slot:
            self._slot = None

    def swapped(self, first: int, second: int) -> None:
        """Follow the prompt's slot to where it now is."""
        if self._slot in (first, second):
            self._slot = second if self._slot == first else first
