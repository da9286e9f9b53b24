"""A loaded graph on a device whose cache all slots share: steps of running sequences have inputs at fixed
addresses there.

Binding the cache takes longer than a small model's step on a GPU, so what a step reads is bound once for each
number of rows and then written in place. That is also what CUDA graphs need: a recorded step reads and writes
the same addresses.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from llorch_serve.cache.device_buffers import DeviceBuffers
from llorch_serve.cache.shared_device_cache import SharedDeviceCache
from llorch_serve.errors import ProviderError
from llorch_serve.providers import ActiveProvider
from llorch_serve.providers.recording_turns import TURNS
from llorch_serve.providers.table import CUDA_GRAPHS
from llorch_serve.runtime.bound_graph import BoundGraph, Logits, LogitsBuffer
from llorch_serve.runtime.choosers import NONE, Choosers
from llorch_serve.runtime.device_step import DeviceStep
from llorch_serve.runtime.leading_graph import LEADING
from llorch_serve.runtime.recordings import UNRECORDED, run_options
from llorch_serve.runtime.step_buffers import Leading, StepBuffers, TokenIds
from llorch_serve.runtime.step_sizes import size_of, step_sizes

logger = logging.getLogger(__name__)


class DeviceGraph:
    """Runs tokens through one graph on the slots of one cache.

    runtime: onnxruntime. provider: of the session; where it captures, steps are recorded.
    session: onnxruntime's. inputs: names of the graph's inputs. logits: for prompts.
    choosers: what finds tokens among the logits, on the device.

    Steps are recorded for the sizes of :func:`llorch_serve.runtime.step_sizes.step_sizes`, a step between two
    sizes gets rows of padding. All are recorded in the first step of a thread, as onnxruntime keeps a
    thread's recordings apart: so none is made while sequences run, where a worker has warmed up before.

    Padding takes slots that may hold a prompt under way, or a prefix for later. It writes behind what such a
    slot holds, where its sequence will write before it reads. Where one is full to its end, the step is not
    recorded and has no padding.
    """

    def __init__(
        self,
        runtime: Any,
        provider: ActiveProvider,
        session: Any,
        inputs: frozenset[str],
        cache: SharedDeviceCache,
        logits: LogitsBuffer,
        choosers: Choosers = NONE,
    ) -> None:
        self._runtime = runtime
        self._provider = provider
        self._session = session
        self._cache = cache
        self._choosers = choosers
        self._cannot_lead = False
        self._unrecorded = run_options(runtime, provider)
        self._prompts = BoundGraph(session, inputs, cache, logits, in_place=False, options=self._unrecorded)
        slots = cache.capacity.slots
        buffers = DeviceBuffers(runtime, provider)
        self._buffers = StepBuffers(buffers, cache.memory, slots, logits.vocab_size, self.leading)
        self._sizes = step_sizes(slots)
        self._steps: dict[tuple[int, bool], DeviceStep] = {}
        self._mine = threading.local()  # recorded: the sizes that a thread has

    @property
    def chooses(self) -> bool:
        """Whether :meth:`run_greedy` is there."""
        return self._choosers.greedy is not None

    @property
    def leading(self) -> int:
        """How many tokens of each row :meth:`run_leading` finds; 0: it is not there."""
        return LEADING if self._choosers.leading is not None else 0

    def run(
        self, first: int, token_ids: Sequence[int], lengths: Sequence[int], wanted: Sequence[int]
    ) -> Logits:
        """Do what :meth:`llorch_serve.runtime.bound_graph.BoundGraph.run` does.

        Raises ProviderError if the runtime fails, ResourceError if the device has no memory left.
        """
        count = len(lengths)
        if first or len(token_ids) != count or tuple(wanted) != tuple(range(count)):
            with TURNS.call():
                found = self._prompts.run(first, token_ids, lengths, wanted)
            self._cache.written(first, lengths)
            return found
        size, padding = self._prepare(count)
        with TURNS.call():
            self._advance(token_ids, lengths, size, padding)
            return self._buffers.logits(count)

    def run_greedy(self, token_ids: Sequence[int], lengths: Sequence[int]) -> TokenIds:
        """Run one token of each of the first slots; return the first of the largest logits of each, [slots],
        or -1 where a logit is not finite. Only these cross to the host.

        lengths: tokens of each slot including this one. Raises as :meth:`run`.
        """
        size, padding = self._prepare(len(lengths))
        with TURNS.call():
            self._advance(token_ids, lengths, size, padding).choose()
            return self._buffers.chosen(len(lengths))

    def run_leading(
        self, token_ids: Sequence[int], lengths: Sequence[int], temperatures: Sequence[float]
    ) -> Leading:
        """Run one token of each of the first slots; return the ids and logits of the likeliest next ones of
        each, [slots, leading], and what all weigh together, [slots]: see
        :func:`llorch_serve.runtime.leading_graph.leading_model`. Only these cross to the host.

        Raises as :meth:`run`. Where they cannot be found, which is logged, totals are not numbers.
        """
        size, padding = self._prepare(len(lengths))
        with TURNS.call():
            found = self._lead(self._advance(token_ids, lengths, size, padding), temperatures)
            return self._buffers.leading(len(lengths)) if found else self._buffers.no_leading(len(lengths))

    def _lead(self, step: DeviceStep, temperatures: Sequence[float]) -> bool:
        """Find the likeliest tokens of a step's first rows; tell whether they are there. Where that fails it
        is not tried again: the logits are there for whoever asks for them.
        """
        if not self._cannot_lead:
            try:
                step.lead(temperatures, self._unrecorded)
            except ProviderError as error:
                logger.warning("the likeliest tokens are not found on the device any more: %s", error)
                self._cannot_lead = True
        return not self._cannot_lead

    def step_logits(self, rows: Sequence[int]) -> Logits:
        """Return logits [len(rows), vocabulary] of some rows of the last step, valid until the next call.

        Raises ProviderError if the device fails.
        """
        with TURNS.call():
            return self._buffers.logits_of(rows)

    def _prepare(self, count: int) -> tuple[int, Sequence[int] | None]:
        """Return the rows of a step of ``count`` sequences, and the lengths of those of padding; None: it is
        not recorded.

        Makes the recordings that a thread has not made: of all sizes in its first step, the largest first, so
        that memory grows once.
        """
        if not self._provider.captures:
            return count, None
        recorded: set[int] | None = getattr(self._mine, "recorded", None)
        if recorded is None:
            self._mine.recorded = recorded = set()
        size = size_of(self._sizes, count)
        wanted = (size,) if recorded else self._sizes[::-1]
        # A recording waits for all calls of other models, so none is begun for slots that are full.
        missing = [each for each in wanted if each not in recorded and self._padding(0, each) is not None]
        if missing:
            with TURNS.recording():
                for each in missing:
                    self._record(each)
                    recorded.add(each)
        padding = self._padding(count, size)
        return (count, None) if padding is None or size not in recorded else (size, padding)

    def _record(self, size: int) -> None:
        """Record a step of rows of padding alone, in slots of which none is full."""
        lengths = self._padding(0, size)
        assert lengths is not None
        step = self._step(size, recorded=True)
        try:
            step.run([0] * size, lengths)
            if self.chooses:
                step.choose()
            if self.leading and size == self._sizes[-1]:
                self._lead(step, [1.0] * size)  # takes its memory now, not in service
        except ProviderError as error:
            raise ProviderError(
                f"{error}; steps of {size} sequences cannot be recorded here, and are not with "
                f"--provider-option {CUDA_GRAPHS}=0"
            ) from error

    def _padding(self, first: int, after: int) -> list[int] | None:
        """Return lengths of rows in slots ``first`` to ``after`` - 1 that write behind what the slots hold;
        None: one is full.
        """
        ends = self._cache.ends[first:after]
        return None if self._cache.capacity.context in ends else [end + 1 for end in ends]

    def _advance(
        self, token_ids: Sequence[int], lengths: Sequence[int], size: int, padding: Sequence[int] | None
    ) -> DeviceStep:
        """Make a step as :meth:`_prepare` says; return it."""
        step = self._step(size, recorded=padding is not None)
        behind = padding or ()
        step.run([*token_ids, *[0] * len(behind)], [*lengths, *behind])
        self._cache.written(0, lengths)
        return step

    def _step(self, size: int, *, recorded: bool) -> DeviceStep:
        step = self._steps.get((size, recorded))
        if step is None:
            options = run_options(self._runtime, self._provider, size if recorded else UNRECORDED)
            io = self._session.io_binding()
            self._cache.bind(io, 0, size)
            # A recording keeps the length that it was made with, so that is the longest; attention reads
            # each row's own beside it.
            total = self._cache.capacity.context if recorded else None
            step = DeviceStep(self._session, self._choosers, io, options, self._buffers, size, total)
            self._steps[size, recorded] = step
        return step
