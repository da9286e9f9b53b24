"""What steps on a device read and write beside the cache: buffers at addresses that never change, one set for
steps of any number of rows.

A recorded step reads and writes the addresses that it was recorded with. Smaller steps have the first rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llorch_serve.cache.device_buffers import FLOAT32, FLOAT64, INT32, INT64, DeviceBuffers
from llorch_serve.providers.device_memory import DeviceMemory

Logits = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]
Leading = tuple[TokenIds, Logits, npt.NDArray[np.float64]]


class StepBuffers:
    """The buffers of steps of up to ``slots`` rows.

    buffers: makes them. memory: the device's. leading: how many of the likeliest tokens of a row are found
        there; 0: none are.
    Raises ResourceError if the device has too little memory, ProviderError if it gave memory elsewhere.
    """

    def __init__(
        self, buffers: DeviceBuffers, memory: DeviceMemory, slots: int, vocab_size: int, leading: int = 0
    ) -> None:
        self._buffers = buffers
        self._memory = memory
        self._vocab_size = vocab_size
        what = f"steps of {slots} sequences"
        self._ids = buffers.make((slots, 1), INT64, what)
        self._lengths = buffers.make((slots,), INT32, what)
        self._rows = buffers.make((slots,), INT64, what)
        self._rows.update_inplace(np.arange(slots))
        self._logits = buffers.make((slots, vocab_size), FLOAT32, what)
        self._chosen = buffers.make((slots,), INT64, what)
        self._leading = leading
        if leading:
            self._scale = buffers.make((slots, 1), FLOAT32, what)
            self._leading_ids = buffers.make((slots, leading), INT64, what)
            self._scores = buffers.make((slots, leading), FLOAT32, what)
            self._totals = buffers.make((slots,), FLOAT64, what)
        # What is written to the device and read from it, in the host's memory.
        self._host_ids = np.zeros((slots, 1), np.int64)
        self._host_lengths = np.zeros(slots, np.int32)
        self._host_logits = np.empty((slots, vocab_size), np.float32)
        self._host_chosen = np.empty(slots, np.int64)
        self._host_scale = np.ones((slots, 1), np.float32)

    def bind(self, io: Any, rows: int) -> None:
        """Bind the first rows as inputs and output of a decoder's step. io: onnxruntime's binding."""
        for name, value, shape, element in (
            ("input_ids", self._ids, (rows, 1), INT64),
            ("seqlens_k", self._lengths, (rows,), INT32),
            ("logits_indices", self._rows, (rows,), INT64),
        ):
            io.bind_input(name, *self._buffers.part(shape, element, value.data_ptr()))
        io.bind_output("logits", *self._logits_part(rows))

    def bind_choice(self, io: Any, rows: int) -> None:
        """Bind the first rows of logits, and where the ids that are chosen from them go."""
        io.bind_input("logits", *self._logits_part(rows))
        io.bind_output("ids", *self._buffers.part((rows,), INT64, self._chosen.data_ptr()))

    def bind_leading(self, io: Any, rows: int) -> None:
        """Bind the first rows of logits and their scales, and where their likeliest tokens go."""
        io.bind_input("logits", *self._logits_part(rows))
        io.bind_input("scale", *self._buffers.part((rows, 1), FLOAT32, self._scale.data_ptr()))
        for name, value, shape, element in (
            ("ids", self._leading_ids, (rows, self._leading), INT64),
            ("scores", self._scores, (rows, self._leading), FLOAT32),
            ("totals", self._totals, (rows,), FLOAT64),
        ):
            io.bind_output(name, *self._buffers.part(shape, element, value.data_ptr()))

    def fill_scale(self, temperatures: Sequence[float]) -> None:
        """Write what the first rows' logits are multiplied with."""
        with np.errstate(over="ignore"):  # a scale without end makes a total that is none
            self._host_scale[: len(temperatures), 0] = 1 / np.array(temperatures)
        self._scale.update_inplace(self._host_scale)

    def leading(self, rows: int) -> Leading:
        """Copy the likeliest tokens of the first rows to the host; return their ids and logits, [rows,
        leading], and the rows' totals, [rows]. Raises ProviderError if the device fails.
        """
        ids = np.empty((rows, self._leading), np.int64)
        scores, totals = np.empty((rows, self._leading), np.float32), np.empty(rows)
        for found, value in ((ids, self._leading_ids), (scores, self._scores), (totals, self._totals)):
            self._memory.read(found, value.data_ptr())
        return ids, scores, totals

    def no_leading(self, rows: int) -> Leading:
        """Return what says of the first rows that their likeliest tokens are not known."""
        ids = np.zeros((rows, self._leading), np.int64)
        return ids, np.zeros((rows, self._leading), np.float32), np.full(rows, np.nan)

    def fill(self, token_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Write what a step is given, one token of each row. lengths: of each row, this token included."""
        rows = len(lengths)
        self._host_ids[:rows, 0] = token_ids
        self._host_lengths[:rows] = lengths
        self._host_lengths[:rows] -= 1
        self._ids.update_inplace(self._host_ids)
        self._lengths.update_inplace(self._host_lengths)

    def logits(self, rows: int) -> Logits:
        """Copy the logits of the first rows to the host; return them, [rows, vocabulary], valid until the
        next call. Raises ProviderError if the device fails.
        """
        return self._read(0, 0, rows)

    def logits_of(self, rows: Sequence[int]) -> Logits:
        """Do what :meth:`logits` does for some rows, [len(rows), vocabulary]; neighbours come in one copy."""
        for _, neighbours in itertools.groupby(enumerate(rows), lambda each: each[1] - each[0]):
            (place, row), *others = neighbours
            self._read(place, row, 1 + len(others))
        return self._host_logits[: len(rows)]

    def _read(self, place: int, row: int, count: int) -> Logits:
        found = self._host_logits[place : place + count]
        self._memory.read(found, self._logits.data_ptr() + row * self._vocab_size * found.itemsize)
        return found

    def chosen(self, rows: int) -> TokenIds:
        """Copy the ids that were chosen for the first rows to the host; return them, [rows]. Raises
        ProviderError if the device fails.
        """
        found = self._host_chosen[:rows]
        self._memory.read(found, self._chosen.data_ptr())
        return found.copy()

    def _logits_part(self, rows: int) -> tuple[Any, ...]:
        return self._buffers.part((rows, self._vocab_size), FLOAT32, self._logits.data_ptr())
