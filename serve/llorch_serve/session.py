"""A decoder graph loaded on an execution provider, with its KV cache bound.

Input and output buffers are bound once for each range of slots and then updated in place: binding the KV tensors
afresh would cost a tenth of a decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psutil

from llorch_serve.artifact import Artifact
from llorch_serve.capabilities import Capabilities
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError, ProviderError
from llorch_serve.kv_cache import KvCache, KvCapacity, plan_capacity
from llorch_serve.manifest import Manifest
from llorch_serve.providers import (
    ARITHMETIC,
    CPU,
    Arithmetic,
    Placement,
    byte_settings,
    check_target,
    import_runtime,
    placement,
    require_arithmetic,
    usable_cpus,
)

Logits = npt.NDArray[np.float32]


class DecoderSession:
    """Runs prefill chunks and decode steps on the slots of its KV cache. Not thread-safe."""

    def __init__(
        self, artifact: Artifact, runtime: Any, session: Any, where: Placement, capacity: KvCapacity
    ) -> None:
        self.artifact = artifact
        self.placement = where
        self.capacity = capacity
        # A target without chunked prefill takes a prompt whole, however long.
        in_parts = artifact.manifest.chunked_prefill  # as are the rest of a reused prefix, and a draft
        self.capabilities = Capabilities(chunked_prefill=in_parts, prefix_reuse=in_parts, drafts=in_parts)
        self.vocab_size = artifact.manifest.model.vocab_size
        self._runtime = runtime
        self._session = session
        self._cache = KvCache(artifact.manifest.kv, capacity)
        self._inputs = frozenset(spec.name for spec in artifact.manifest.inputs)
        self._bindings: dict[tuple[int, int], _Binding] = {}
        self._logits = np.empty((capacity.slots, self.vocab_size), np.float32)

    def prefill(
        self, slot: int, token_ids: Sequence[int], start: int, wanted: Sequence[int] | None = None
    ) -> Logits:
        """Run ``token_ids`` at positions ``start`` and on of one slot.

        wanted: indices into ``token_ids`` whose logits are returned; None: the last one's.
        Returns logits [len(wanted), vocabulary], valid until the next call.
        Raises ProviderError if the runtime fails.
        """
        binding = self._binding(slot, 1)
        rows = [len(token_ids) - 1] if wanted is None else wanted
        binding.resize(tokens=len(token_ids), rows=len(rows), buffer=self._logits_buffer(len(rows)))
        binding.input_ids[0] = token_ids
        binding.seqlens_k[0] = start + len(token_ids) - 1
        binding.total[...] = start + len(token_ids)
        binding.indices[:] = rows
        return self._run(binding)

    def decode(self, token_ids: Sequence[int], lengths: Sequence[int]) -> Logits:
        """Run one token of each of the slots 0, 1, ... len(token_ids) - 1.

        lengths: tokens of each slot including this one. Returns logits [slots, vocabulary], valid until the next call.
        Raises ProviderError if the runtime fails.
        """
        count = len(token_ids)
        binding = self._binding(0, count)
        binding.resize(tokens=1, rows=count, buffer=self._logits_buffer(count))
        binding.input_ids[:, 0] = token_ids
        binding.seqlens_k[:] = lengths
        binding.seqlens_k -= 1
        binding.total[...] = max(lengths)
        binding.indices[:] = range(count)
        return self._run(binding)

    def verify(self, slot: int, token_ids: Sequence[int], start: int) -> Logits:
        """Run ``token_ids`` at positions ``start`` and on of one slot; return logits [len(token_ids), vocabulary].

        Raises ProviderError if the runtime fails.
        """
        return self.prefill(slot, token_ids, start, range(len(token_ids)))

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        """Copy the keys and values of the first ``tokens`` positions to another slot."""
        self._cache.copy(source, target, tokens)

    def swap_slots(self, first: int, second: int, tokens: int) -> None:
        """Exchange the keys and values of the first ``tokens`` positions of two slots."""
        self._cache.swap(first, second, tokens)

    def release_slot(self, slot: int, keep: int) -> None:
        """Give the memory behind a slot's positions from ``keep`` on back to the system."""
        self._cache.release(slot, keep)

    def _run(self, binding: _Binding) -> Logits:
        try:
            self._session.run_with_iobinding(binding.io)
        except Exception as error:
            raise ProviderError(
                f"the runtime failed in a step: {str(error).strip().splitlines()[0]}"
            ) from error
        return binding.logits

    def _binding(self, first: int, count: int) -> _Binding:
        binding = self._bindings.get((first, count))
        if binding is None:
            binding = self._bindings[first, count] = self._bind(first, count)
        return binding

    def _bind(self, first: int, count: int) -> _Binding:
        kv = self.artifact.manifest.kv
        io = self._session.io_binding()
        for layer in range(kv.layers):
            for kind in ("key", "value"):
                rows = self._cache.rows(layer, kind, first, count)
                place = ("cpu", 0, self._cache.dtype, rows.shape, rows.ctypes.data)
                io.bind_input(kv.past_name.format(layer=layer, kind=kind), *place)
                io.bind_output(kv.present_name.format(layer=layer, kind=kind), *place)
        return _Binding(io, count, self._inputs)

    def _logits_buffer(self, rows: int) -> Logits:
        """Return the buffer that all bindings share, grown to at least ``rows``."""
        if rows > len(self._logits):
            self._logits = np.empty((rows, self.vocab_size), np.float32)
        return self._logits


class _Binding:
    """Bound buffers of one range of slots. The KV tensors stay; the small ones follow the shape of the call.

    inputs: names of the graph's inputs; the buffers of those that its target has not are filled and bound to nothing.
    """

    def __init__(self, io: Any, batch: int, inputs: frozenset[str]) -> None:
        self.io = io
        self._inputs = inputs
        self.batch = batch
        self.seqlens_k = np.zeros(batch, np.int32)
        self.total = np.zeros((), np.int32)
        self.input_ids = np.zeros((batch, 0), np.int64)
        self.indices = np.zeros(0, np.int64)
        self.logits = self._buffer = np.zeros((0, 0), np.float32)
        self._tokens = self._rows = -1
        self._bind_input("seqlens_k", self.seqlens_k)
        self._bind_input("total_sequence_length", self.total)

    def resize(self, *, tokens: int, rows: int, buffer: Logits) -> None:
        """Bind inputs for ``tokens`` tokens a slot and the first ``rows`` rows of ``buffer``, unless bound already."""
        if self._tokens != tokens:
            self._tokens = tokens
            self.input_ids = np.zeros((self.batch, tokens), np.int64)
            self._bind_input("input_ids", self.input_ids)
        if self._rows != rows or self._buffer is not buffer:
            self._rows, self._buffer = rows, buffer
            self.indices = np.zeros(rows, np.int64)
            self.logits = buffer[:rows]
            self._bind_input("logits_indices", self.indices)
            self.io.bind_output("logits", "cpu", 0, np.float32, self.logits.shape, self.logits.ctypes.data)

    def _bind_input(self, name: str, array: npt.NDArray[np.generic]) -> None:
        if name in self._inputs:
            self.io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What opening a session decided. notice: something a person should read, or None."""

    threads: int
    capacity: KvCapacity
    notice: str | None


def open_session(
    artifact: Artifact, config: SessionConfig, report: Callable[[LoadReport], None]
) -> DecoderSession:
    """Load the artifact's graph and allocate its KV cache.

    Raises ProviderError if the runtime is missing, cannot compute in the artifact's type or will not run the graph,
    ArtifactError if the graph is damaged, ResourceError or UsageError if slots and context do not fit.
    """
    manifest = artifact.manifest
    if manifest.layout != "llorch":
        raise ArtifactError(
            f"{artifact.folder} holds a graph of {artifact.kind.value}'s, which this command does not run; expected one of "
            "llorch's own. Such a graph goes with llorch generate, serve, bench and verify --against"
        )
    check_target(manifest.target, CPU)
    require_arithmetic(CPU, (manifest.recipe.compute_type, manifest.kv.dtype))
    runtime = import_runtime(manifest.min_onnxruntime)
    free = psutil.virtual_memory().available - loaded_bytes(manifest, CPU)
    capacity = plan_capacity(
        manifest.kv,
        slots=config.slots,
        context_length=manifest.context_length,
        max_context=config.max_context,
        free_bytes=max(free, 0),
        cache_bytes=config.kv_cache_bytes,
    )
    threads = config.threads or usable_cpus()
    report(LoadReport(threads, capacity, capacity.notice(manifest.context_length)))
    session = _load_graph(artifact, runtime, threads)
    _check_signature(artifact, session)
    _check_inputs(artifact)
    return DecoderSession(artifact, runtime, session, placement(session, CPU), capacity)


_FILLED: Final = frozenset({"input_ids", "seqlens_k", "total_sequence_length", "logits_indices"})
"""Inputs that a session fills, beside the past. ``seqlens_k`` is each row's length in all, minus one."""


def _check_inputs(artifact: Artifact) -> None:
    """Raise ArtifactError if the graph has an input that no session fills."""
    kv = artifact.manifest.kv
    past = {
        kv.past_name.format(layer=layer, kind=kind) for layer in range(kv.layers) for kind in ("key", "value")
    }
    if odd := sorted({spec.name for spec in artifact.manifest.inputs} - _FILLED - past):
        raise ArtifactError(
            f"{artifact.graph_path} has the inputs {', '.join(odd[:5])}, which this llorch does not fill; it fills "
            f"{', '.join(sorted(_FILLED))} and the past. Export the model again, or upgrade llorch"
        )


def loaded_bytes(manifest: Manifest, provider: str) -> int:
    """Return the memory that the loaded files take: those of whole weights in a type that is widened, twice their size."""
    stored = sum(entry.bytes for entry in manifest.files)
    recipe = manifest.recipe
    whole = recipe.precision in ("fp16", "bf16")
    return stored * (2 if whole and ARITHMETIC[provider][recipe.compute_type] is Arithmetic.WIDENED else 1)


def runtime_options(runtime: Any, threads: int) -> Any:
    """Return onnxruntime's options for a session that runs on so many threads."""
    runtime.set_default_logger_severity(3)
    options = runtime.SessionOptions()
    # An explicit count also keeps the runtime from pinning threads to CPUs outside the process's cpuset.
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return options


def _load_graph(artifact: Artifact, runtime: Any, threads: int) -> Any:
    options = runtime_options(runtime, threads)
    if artifact.manifest.recipe.multiplies_bytes:
        for setting in byte_settings().items():
            options.add_session_config_entry(*setting)
    try:
        return runtime.InferenceSession(
            str(artifact.graph_path), sess_options=options, providers=[CPU], enable_fallback=False
        )
    except Exception as error:
        text = " ".join(str(error).split())[:500]
        raise ArtifactError(
            f"{artifact.graph_path} cannot be loaded: {text}. Export the model again."
        ) from error


_ONNX_TYPES: Final = {
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "bfloat16": "tensor(bfloat16)",
    "int32": "tensor(int32)",
    "int64": "tensor(int64)",
}


def _check_signature(artifact: Artifact, session: Any) -> None:
    """Compare the graph's inputs and outputs with the manifest's: names, types, and sizes where they are fixed."""
    manifest = artifact.manifest
    for what, specs, nodes in (
        ("inputs", manifest.inputs, session.get_inputs()),
        ("outputs", manifest.outputs, session.get_outputs()),
    ):
        expected = {spec.name: (_ONNX_TYPES[spec.dtype], _fixed(spec.shape)) for spec in specs}
        found = {node.name: (node.type, _fixed(node.shape)) for node in nodes}
        odd = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
        if odd:
            raise ArtifactError(
                f"{artifact.graph_path}: {what} differ from the manifest ({', '.join(odd[:5])}); export the model again"
            )


def _fixed(shape: Sequence[int | str | None]) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in shape)
