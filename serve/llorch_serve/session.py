"""An artifact loaded on an execution provider: its graphs, bound to one KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import psutil

from llorch_serve.artifact import Artifact
from llorch_serve.bound_graph import BoundGraph, Logits, LogitsBuffer
from llorch_serve.capabilities import Capabilities
from llorch_serve.chunking import doubling_position
from llorch_serve.config import DEFAULT_PREFILL_CHUNK, SessionConfig
from llorch_serve.device_buffers import DeviceBuffers
from llorch_serve.device_cache import DeviceCache
from llorch_serve.device_graph import DeviceGraph
from llorch_serve.doctor.self_test import attention_rows, too_many_rows
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.graph_loading import check_signature, load_graph
from llorch_serve.handoff import Handoff, read_scales
from llorch_serve.kv_cache import KvCache, KvCapacity, SlotCache, plan_capacity
from llorch_serve.manifest import KvDtype, KvLayout, Manifest, PromptGraph, Recipe, cache_names
from llorch_serve.providers import (
    ARITHMETIC,
    CPU,
    ActiveProvider,
    Arithmetic,
    Memory,
    Placement,
    ProviderChoice,
    activate,
    check_target,
    import_runtime,
    placement,
    require_arithmetic,
    usable_cpus,
)
from llorch_serve.providers.device_memory import DeviceMemory, device_memory
from llorch_serve.row_pairs import PAIRED, PairedGraph, even, require_effect
from llorch_serve.shared_device_cache import SharedDeviceCache

_Graph = BoundGraph | PairedGraph | DeviceGraph

_MOST_SCORES: Final = 2**28
"""Bytes of attention scores that the plain kernel may hold at once; in longer contexts prompts take the one in tiles."""


class DecoderSession:
    """Runs prefill chunks and decode steps on the slots of its KV cache. Not thread-safe.

    steps: the graph that advances running sequences. prompts: the one that takes prompts, often the same.
    cache: what running sequences read. capacity: what of it there is for sequences. handoff: where prompts are computed in another type than that one's.
    most_rows: of one sequence that a call may have; None: any number.
    """

    def __init__(
        self,
        artifact: Artifact,
        where: Placement,
        cache: SlotCache,
        *,
        capacity: KvCapacity,
        steps: _Graph,
        prompts: _Graph,
        handoff: Handoff | None,
        batch_invariant: bool,
        most_rows: int | None = None,
    ) -> None:
        self.artifact = artifact
        self.placement = where
        self.capacity = capacity
        self.kv_dtype = cache.kv.dtype
        # A target without chunked prefill takes a prompt whole, however long.
        in_parts = artifact.manifest.chunked_prefill  # as are the rest of a reused prefix, and a draft
        self.capabilities = Capabilities(
            batched_decode=not isinstance(cache, DeviceCache),
            batch_invariant=batch_invariant,
            chunked_prefill=in_parts,
            prefix_reuse=in_parts,
            drafts=in_parts,
            separate_prompts=prompts is not steps,
            doubling_position=doubling_position(artifact.manifest.model) if in_parts else None,
        )
        self.vocab_size = artifact.manifest.model.vocab_size
        self.cache = cache
        self._steps = steps
        self._prompts = prompts
        self._handoff = handoff
        self._most_rows = most_rows

    def prefill(
        self, slot: int, token_ids: Sequence[int], start: int, wanted: Sequence[int] | None = None
    ) -> Logits:
        """Run ``token_ids`` at positions ``start`` and on of one slot.

        wanted: indices into ``token_ids`` whose logits are returned; None: the last one's.
        Returns logits [len(wanted), vocabulary], valid until the next call.
        Raises ProviderError if the runtime fails.
        """
        rows = [len(token_ids) - 1] if wanted is None else wanted
        if self._handoff is None:
            return self._advance(self._prompts, slot, token_ids, start, rows)
        self._handoff.begin(slot, start)
        logits = self._advance(self._prompts, 0, token_ids, start, rows)
        self._handoff.end(start + len(token_ids))
        return logits

    def decode(self, token_ids: Sequence[int], lengths: Sequence[int]) -> Logits:
        """Run one token of each of the slots 0, 1, ... len(token_ids) - 1.

        lengths: tokens of each slot including this one. Returns logits [slots, vocabulary], valid until the next call.
        Raises ProviderError if the runtime fails.
        """
        if self.capabilities.batched_decode:
            return self._steps.run(0, token_ids, lengths, range(len(token_ids)))
        rows = enumerate(zip(token_ids, lengths, strict=True))
        return np.concatenate(
            [self._steps.run(slot, (token,), (length,), (0,)).copy() for slot, (token, length) in rows]
        )

    def verify(self, slot: int, token_ids: Sequence[int], start: int) -> Logits:
        """Run ``token_ids`` at positions ``start`` and on of one slot; return logits [len(token_ids), vocabulary].

        Raises ProviderError if the runtime fails.
        """
        return self._advance(self._steps, slot, token_ids, start, range(len(token_ids)))

    def _advance(
        self,
        graph: _Graph,
        slot: int,
        token_ids: Sequence[int],
        start: int,
        rows: Sequence[int],
    ) -> Logits:
        """Run tokens of one slot, in as many calls as it takes."""
        most = self._most_rows or len(token_ids)
        if len(token_ids) <= most:
            return graph.run(slot, token_ids, [start + len(token_ids)], rows)
        logits = np.empty((len(rows), self.vocab_size), np.float32)
        for first in range(0, len(token_ids), most):
            part = token_ids[first : first + most]
            here = [place for place, row in enumerate(rows) if first <= row < first + len(part)]
            # A call has some row of logits, wanted or not.
            wanted = [rows[place] - first for place in here] or [0]
            found = graph.run(slot, part, [start + first + len(part)], wanted)
            logits[here] = found[: len(here)]
        return logits

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        """Copy the keys and values of the first ``tokens`` positions to another slot."""
        self.cache.copy(source, target, tokens)
        if self._handoff is not None:
            self._handoff.overwritten(target)

    def swap_slots(self, first: int, second: int, tokens: int) -> None:
        """Exchange the keys and values of the first ``tokens`` positions of two slots."""
        self.cache.swap(first, second, tokens)
        if self._handoff is not None:
            self._handoff.swapped(first, second)

    def release_slot(self, slot: int, keep: int) -> None:
        """Give the memory behind a slot's positions from ``keep`` on back to the system."""
        self.cache.release(slot, keep)


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
    if config.provider == ProviderChoice():  # what the table says of the CPU needs no runtime
        _check_fit(manifest, CPU)
    kv = msgspec.structs.replace(manifest.kv, dtype=_chosen_dtype(manifest, config))
    int8 = manifest.int8_cache if kv.dtype == "int8" else None
    runtime = import_runtime(manifest.min_onnxruntime)
    provider = activate(config.provider, runtime)
    _check_fit(manifest, provider.runtime_name)
    if int8 is not None:
        import_runtime(int8.min_onnxruntime, instead=f"or use --kv-dtype {manifest.kv.dtype}")
    own = None if config.single_graph else manifest.prompts
    if config.single_graph and int8 is None and manifest.prompts is None:
        raise UsageError(
            "--single-graph has no effect here: prompts and answers run on one graph; leave it out"
        )
    step_path = artifact.graph_path if int8 is None else artifact.folder / int8.decode_graph
    prompt_path = artifact.graph_path if own is None else artifact.folder / own.graph
    apart = own is not None or (int8 is not None and not config.single_graph)
    precisions = manifest.recipe.precisions | (frozenset() if own is None else own.recipe.precisions)
    on_cpu = provider.runtime_name == CPU
    if config.batch_invariant:
        require_effect(precisions, on_cpu=on_cpu)
    loaded = loaded_bytes(manifest, provider.runtime_name, weights=1 + apart, prompts=own)
    memory = device_memory(provider, runtime)
    available = psutil.virtual_memory().available if memory is None else memory.free_bytes()
    free = max(provider.memory_limit(available) - loaded, 0)
    if apart and int8 is not None:  # the prompt under way has a cache of its own
        free -= min(manifest.kv.bytes_per_token * (config.max_context or manifest.context_length), free // 3)
    capacity = plan_capacity(
        kv,
        slots=config.slots,
        context_length=manifest.context_length,
        max_context=config.max_context,
        free_bytes=free,
        cache_bytes=config.kv_cache_bytes,
        whole=memory is not None,
    )
    threads = config.threads or usable_cpus()
    most_rows = None if on_cpu else attention_rows(runtime, provider, threads)
    notices = [
        capacity.notice(manifest.context_length),
        None if most_rows is None else f"{provider.runtime_name}: {too_many_rows(most_rows)}",
    ]
    report(LoadReport(threads, capacity, "; ".join(filter(None, notices)) or None))
    # A spare slot for a row of padding, of which one page is ever written.
    buffers = replace(capacity, slots=even(capacity.slots)) if config.batch_invariant else capacity
    logits = LogitsBuffer(buffers.slots, manifest.model.vocab_size)
    inputs = frozenset(spec.name for spec in manifest.inputs)

    def bound(path: Path, recipe: Recipe, slots: SlotCache, *, plain: bool) -> tuple[Placement, _Graph]:
        session = load_graph(path, recipe, runtime, threads, provider, plain=plain)
        check_signature(artifact, path, session, slots.kv.dtype)
        where = placement(
            session, provider.runtime_name, graph=path, allow_cpu_nodes=config.provider.allow_cpu_nodes
        )
        return where, _bind(
            session, slots, logits, inputs, runtime, provider, batch_invariant=config.batch_invariant
        )

    cache = _make_cache(kv, buffers, runtime, provider, memory)
    where, steps = bound(step_path, manifest.recipe, cache, plain=int8 is not None)
    _check_inputs(artifact)
    prompts, handoff = steps, None
    if apart and int8 is not None:
        own_cache = KvCache(manifest.kv, replace(capacity, slots=2 if config.batch_invariant else 1))
        assert isinstance(cache, KvCache)  # a cache in int8 is of the CPU's target alone
        handoff = Handoff(own_cache, cache, read_scales(artifact.folder / int8.scales, kv))
    if apart:
        _, prompts = bound(
            prompt_path,
            manifest.recipe if own is None else own.recipe,
            cache if handoff is None else handoff.prompt,
            plain=4 * manifest.model.num_attention_heads * DEFAULT_PREFILL_CHUNK * capacity.context
            <= _MOST_SCORES,
        )
    return DecoderSession(
        artifact,
        where,
        cache,
        capacity=capacity,
        steps=steps,
        prompts=prompts,
        handoff=handoff,
        most_rows=most_rows,
        batch_invariant=on_cpu and (config.batch_invariant or not PAIRED & precisions),
    )


def _make_cache(
    kv: KvLayout, capacity: KvCapacity, runtime: Any, provider: ActiveProvider, memory: DeviceMemory | None
) -> SlotCache:
    if memory is not None:
        return SharedDeviceCache(kv, capacity, DeviceBuffers(runtime, provider), memory)
    if provider.memory is Memory.DEVICE:
        return DeviceCache(kv, capacity, runtime, provider)
    return KvCache(kv, capacity)


def _bind(
    session: Any,
    cache: SlotCache,
    logits: LogitsBuffer,
    inputs: frozenset[str],
    runtime: Any,
    provider: ActiveProvider,
    *,
    batch_invariant: bool,
) -> _Graph:
    if isinstance(cache, SharedDeviceCache):
        buffers = DeviceBuffers(runtime, provider)
        return DeviceGraph(runtime, session, inputs, cache, buffers, logits, captured=provider.captures)
    graph = BoundGraph(session, inputs, cache, logits, in_place=provider.in_place)
    if not batch_invariant:
        return graph
    assert isinstance(cache, KvCache)  # as the CPU's is
    return PairedGraph(graph, cache)


def _check_fit(manifest: Manifest, provider: str) -> None:
    check_target(manifest.target, provider)
    require_arithmetic(provider, (manifest.recipe.compute_type,))


def _chosen_dtype(manifest: Manifest, config: SessionConfig) -> KvDtype:
    """Return what the cache holds. Raises UsageError if the artifact has no graph for it."""
    if config.kv_dtype is not None and config.kv_dtype not in manifest.kv_dtypes:
        raise UsageError(
            f"--kv-dtype is {config.kv_dtype}; this artifact has graphs for {' and '.join(manifest.kv_dtypes)}. "
            "Export it with --kv-dtype int8 for a cache in int8, or in another --compute-type"
        )
    return config.kv_dtype or manifest.kv_dtypes[0]


_FILLED: Final = frozenset({"input_ids", "seqlens_k", "total_sequence_length", "logits_indices"})
"""Inputs that a session fills, beside the past. ``seqlens_k`` is each row's length in all, minus one."""


def _check_inputs(artifact: Artifact) -> None:
    """Raise ArtifactError if the graph has an input that no session fills."""
    kv = artifact.manifest.kv
    if odd := sorted({spec.name for spec in artifact.manifest.inputs} - _FILLED - cache_names(kv)):
        raise ArtifactError(
            f"{artifact.graph_path} has the inputs {', '.join(odd[:5])}, which this llorch does not fill; it fills "
            f"{', '.join(sorted(_FILLED))} and the past. Export the model again, or upgrade llorch"
        )


def loaded_bytes(
    manifest: Manifest, provider: str, *, weights: int = 1, prompts: PromptGraph | None = None
) -> int:
    """Return the memory that the loaded files take: those of whole weights in a type that is widened, twice their size.

    weights: graphs that are loaded over the first data file; each has them once more, as its kernels arrange them. One for prompts
        that has others beside them counts whole, which is a little too much.
    prompts: the graph for prompts, if it is loaded too.
    """
    apart = 0 if manifest.prompts is None else _bytes(manifest, manifest.prompts.data)
    stored = weights * (sum(entry.bytes for entry in manifest.files) - apart)
    if prompts is not None:
        stored += _bytes(manifest, prompts.data)
    recipe = manifest.recipe
    whole = recipe.precision in ("fp16", "bf16")
    arithmetic = ARITHMETIC.get(provider, {}).get(recipe.compute_type)
    return stored * (2 if whole and arithmetic is Arithmetic.WIDENED else 1)


def _bytes(manifest: Manifest, name: str) -> int:
    return next(entry.bytes for entry in manifest.files if entry.path == name)
