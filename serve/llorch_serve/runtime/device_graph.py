"""A loaded graph on a device whose cache all slots share: steps of running sequences have inputs at fixed
addresses there.

Binding the cache takes longer than a small model's step on a GPU, so what a step reads is bound once for each
number of sequences and then written in place. That is also what CUDA graphs need: a recorded step reads and
writes the same addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from llorch_serve.cache.device_buffers import FLOAT32, INT32, INT64, DeviceBuffers
from llorch_serve.cache.shared_device_cache import SharedDeviceCache
from llorch_serve.runtime.bound_graph import BoundGraph, Logits, LogitsBuffer, runs

_GRAPH_ID: Final = "gpu_graph_id"  # of a run, in onnxruntime: which recording it makes or replays; -1: none


class DeviceGraph:
    """Runs tokens through one graph on the slots of one cache.

    runtime: onnxruntime. session: its. inputs: names of the graph's inputs. logits: for prompts.
    captured: the session records the kernels of calls; each number of sequences gets a recording of its own.
    """

    def __init__(
        self,
        runtime: Any,
        session: Any,
        inputs: frozenset[str],
        cache: SharedDeviceCache,
        buffers: DeviceBuffers,
        logits: LogitsBuffer,
        *,
        captured: bool,
    ) -> None:
        self._runtime = runtime
        self._session = session
        self._cache = cache
        self._buffers = buffers
        self._vocab_size = logits.vocab_size
        self._captured = captured
        options = self._options(-1) if captured else None
        self._prompts = BoundGraph(session, inputs, cache, logits, in_place=False, options=options)
        self._steps: dict[int, _Step] = {}

    def run(
        self, first: int, token_ids: Sequence[int], lengths: Sequence[int], wanted: Sequence[int]
    ) -> Logits:
        """Do what :meth:`llorch_serve.runtime.bound_graph.BoundGraph.run` does.

        Raises ProviderError if the runtime fails, ResourceError if the device has no memory left.
        """
        count = len(lengths)
        if first or len(token_ids) != count or tuple(wanted) != tuple(range(count)):
            return self._prompts.run(first, token_ids, lengths, wanted)
        step = self._steps.get(count)
        if step is None:
            step = self._steps[count] = self._step(count)
        return step.run(token_ids, lengths)

    def _step(self, count: int) -> _Step:
        io = self._session.io_binding()
        self._cache.bind(io, 0, count)
        options = self._options(count) if self._captured else None
        # A recording keeps the length that it was made with, so that is the longest; attention reads each
        # row's own beside it.
        total = self._cache.capacity.context if self._captured else None
        return _Step(self._session, io, options, self._buffers, count, self._vocab_size, total)

    def _options(self, recording: int) -> Any:
        options = self._runtime.RunOptions()
        options.add_run_config_entry(_GRAPH_ID, str(recording))
        return options


class _Step:
    """One token of each of the first ``count`` slots. total: the largest length that the graph is told; None:
    the one there is.
    """

    def __init__(
        self,
        session: Any,
        io: Any,
        options: Any,
        buffers: DeviceBuffers,
        count: int,
        vocab_size: int,
        total: int | None,
    ) -> None:
        self._session = session
        self._io = io
        self._options = options
        self._fixed = total is not None
        self._total = np.array(total or 0, np.int32)
        self._shape = (count, 1)
        what = f"a step of {count} sequences"
        self._ids = buffers.make(self._shape, INT64, what)
        self._lengths = buffers.make((count,), INT32, what)
        self._rows = buffers.make((count,), INT64, what)
        self._rows.update_inplace(np.arange(count))
        self._logits = buffers.make((count, vocab_size), FLOAT32, what)
        for name, value in (
            ("input_ids", self._ids),
            ("seqlens_k", self._lengths),
            ("logits_indices", self._rows),
        ):
            io.bind_ortvalue_input(name, value)
        io.bind_ortvalue_output("logits", self._logits)
        self._bind_total()

    def run(self, token_ids: Sequence[int], lengths: Sequence[int]) -> Logits:
        """Return logits [count, vocabulary]. Raises ProviderError if the runtime fails."""
        with runs():
            self._ids.update_inplace(np.array(token_ids, np.int64).reshape(self._shape))
            self._lengths.update_inplace(np.array(lengths, np.int32) - np.int32(1))
            if not self._fixed:
                self._total[...] = max(lengths)
                self._bind_total()
            self._session.run_with_iobinding(self._io, self._options)
            logits: Logits = self._logits.numpy()
        return logits

    def _bind_total(self) -> None:
        """Bind the largest length, which kernels read in host memory while they are launched."""
        total = self._total
        self._io.bind_input("total_sequence_length", "cpu", 0, np.int32, total.shape, total.ctypes.data)
