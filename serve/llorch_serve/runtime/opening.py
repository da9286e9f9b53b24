"""Opening an artifact: which of its graphs, on which provider, over a cache of what size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import KvDtype, KvLayout, Manifest, PromptGraph, Recipe, cache_names
from llorch_serve.cache.device_buffers import DeviceBuffers
from llorch_serve.cache.device_cache import DeviceCache
from llorch_serve.cache.handoff import Handoff, read_scales
from llorch_serve.cache.kv_cache import KvCache, KvCapacity, SlotCache, plan_capacity
from llorch_serve.cache.shared_device_cache import SharedDeviceCache
from llorch_serve.config import DEFAULT_PREFILL_CHUNK, SessionConfig
from llorch_serve.errors import ArtifactError, UsageError
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
    takes_no_rows,
    usable_cpus,
)
from llorch_serve.providers.device_memory import DeviceMemory, device_memory
from llorch_serve.runtime.bound_graph import BoundGraph, LogitsBuffer
from llorch_serve.runtime.device_graph import DeviceGraph
from llorch_serve.runtime.graph_loading import check_signature, load_graph
from llorch_serve.runtime.operator_check import attention_rows, too_many_rows
from llorch_serve.runtime.row_pairs import PairedGraph, even, require_effect, takes_pairs
from llorch_serve.runtime.session import DecoderSession, Graph

_MOST_SCORES: Final = 2**28
"""Bytes of attention scores that the plain kernel may hold at once; in longer contexts prompts take the one
in tiles.
"""


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

    Raises ProviderError if the runtime is missing, cannot compute in the artifact's type or will not run the
    graph, ArtifactError if the graph is damaged, ResourceError or UsageError if slots and context do not fit.
    """
    manifest = artifact.manifest
    if manifest.layout != "llorch":
        raise ArtifactError(
            f"{artifact.folder} holds a graph of {artifact.kind.value}'s, which this command does not run; "
            f"expected one of "
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
    recipes = (manifest.recipe,) if own is None else (manifest.recipe, own.recipe)
    bytes_in_prompts = (manifest.recipe if own is None else own.recipe).multiplies_bytes
    on_cpu = provider.runtime_name == CPU
    if config.batch_invariant:
        require_effect(recipes, on_cpu=on_cpu)
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

    def bound(path: Path, recipe: Recipe, slots: SlotCache, *, plain: bool) -> tuple[Placement, Graph]:
        session = load_graph(path, recipe, runtime, threads, provider, plain=plain)
        check_signature(artifact, path, session, slots.kv.dtype)
        where = placement(
            session, provider.runtime_name, graph=path, allow_cpu_nodes=config.provider.allow_cpu_nodes
        )
        where = replace(where, device=provider.device)
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
        some_row=bytes_in_prompts and not takes_no_rows(runtime),
        batch_invariant=on_cpu and (config.batch_invariant or not any(map(takes_pairs, recipes))),
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
) -> Graph:
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
            f"--kv-dtype is {config.kv_dtype}; this artifact has graphs for "
            f"{' and '.join(manifest.kv_dtypes)}. "
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
            f"{artifact.graph_path} has the inputs {', '.join(odd[:5])}, which this llorch does not fill; "
            f"it fills "
            f"{', '.join(sorted(_FILLED))} and the past. Export the model again, or upgrade llorch"
        )


def loaded_bytes(
    manifest: Manifest, provider: str, *, weights: int = 1, prompts: PromptGraph | None = None
) -> int:
    """Return the memory that the loaded files take: those of whole weights in a type that is widened, twice
    their size.

    weights: graphs that are loaded over the first data file; each has them once more, as its kernels arrange
        them. One for prompts that has others beside them counts whole, which is a little too much.
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
