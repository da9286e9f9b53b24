"""A step of running sequences on a device: bound once, then made again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from llorch_serve.runtime.bound_graph import runs
from llorch_serve.runtime.step_buffers import StepBuffers


class DeviceStep:
    """One token of each of the first ``size`` slots.

    total: the largest length that the graph is told; None: the one there is.
    """

    def __init__(
        self,
        session: Any,
        greedy: Any,
        io: Any,
        options: Any,
        buffers: StepBuffers,
        size: int,
        total: int | None,
    ) -> None:
        self._session = session
        self._greedy = greedy
        self._io = io
        self._options = options
        self._buffers = buffers
        self._fixed = total is not None
        self._total = np.array(total or 0, np.int32)
        buffers.bind(io, size)
        self._bind_total()
        self._choice: Any = None
        if greedy is not None:
            self._choice = greedy.io_binding()
            buffers.bind_choice(self._choice, size)

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
            self._greedy.run_with_iobinding(self._choice, self._options)

    def _bind_total(self) -> None:
        """Bind the largest length, which kernels read in host memory while they are launched."""
        total = self._total
        self._io.bind_input("total_sequence_length", "cpu", 0, np.int32, total.shape, total.ctypes.data)
