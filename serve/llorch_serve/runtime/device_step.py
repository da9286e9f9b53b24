"""A step of running sequences on a device: bound once, then made again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from llorch_serve.runtime.bound_graph import runs
from llorch_serve.runtime.choosers import Choosers
from llorch_serve.runtime.step_buffers import StepBuffers


class DeviceStep:
    """One token of each of the first ``size`` slots.

    choosers: what finds tokens among the logits.
    total: the largest length that the graph is told; None: the one there is.
    """

    def __init__(
        self,
        session: Any,
        choosers: Choosers,
        io: Any,
        options: Any,
        buffers: StepBuffers,
        size: int,
        total: int | None,
    ) -> None:
        self._session = session
        self._choosers = choosers
        self._io = io
        self._options = options
        self._buffers = buffers
        self._fixed = total is not None
        self._total = np.array(total or 0, np.int32)
        buffers.bind(io, size)
        self._bind_total()
        self._choice: Any = None
        if choosers.greedy is not None:
            self._choice = choosers.greedy.io_binding()
            buffers.bind_choice(self._choice, size)
        self._likeliest: Any = None
        if choosers.leading is not None:
            self._likeliest = choosers.leading.io_binding()
            buffers.bind_leading(self._likeliest, size)

    def run(self, token_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Compute the logits, which stay on the device. Raises ProviderError if the runtime fails."""
        with runs():
            self._buffers.fill(token_ids, lengths)
            if not self._fixed:
                self._total[...] = max(lengths)
                self._bind_total()
            self._session.run_with_iobinding(self._io, self._options)

    def choose(self) -> None:
        """Choose an id from the logits of each row. Raises ProviderError if the runtime fails."""
        with runs():
            self._choosers.greedy.run_with_iobinding(self._choice, self._options)

    def lead(self, temperatures: Sequence[float], unrecorded: Any) -> None:
        """Find the likeliest tokens of each row. temperatures: of the first rows. unrecorded: options of a
        call that is not recorded.

        Raises ProviderError if the runtime fails.
        """
        with runs():
            self._buffers.fill_scale(temperatures)
            # The operator that finds them may ask for memory or wait, which a recording cannot have.
            self._choosers.leading.run_with_iobinding(self._likeliest, unrecorded)

    def _bind_total(self) -> None:
        """Bind the largest length, which kernels read in host memory while they are launched."""
        total = self._total
        self._io.bind_input("total_sequence_length", "cpu", 0, np.int32, total.shape, total.ctypes.data)
