"""How much memory a session's caches may take, once its graphs are loaded.

Input: the chosen graphs, the configuration and what is free. Output: a :class:`MemoryPlan`; nothing is
allocated here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import psutil

from llorch_serve.artifact.manifest import Manifest
from llorch_serve.cache.kv_cache import KvCapacity, plan_capacity
from llorch_serve.config import SessionConfig
from llorch_serve.providers import ARITHMETIC, ActiveProvider, Arithmetic
from llorch_serve.providers.device_memory import DeviceMemory
from llorch_serve.runtime.graph_choice import GraphChoice
from llorch_serve.runtime.row_pairs import even

PASSING: Final = 12
"""Times what weights take more once they are widened: what the runtime has on the way (measured: 6 to 12)."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sizes of a session's caches.

    capacity: what sequences may use.
    buffers: what is allocated. --batch-invariant takes an even number of slots: one more than asked for, if
        that is odd, for a row of padding.
    prompt_buffers: the cache that prompts are computed in before they are converted to int8; None: they are
        computed in the slots' own.
    """

    capacity: KvCapacity
    buffers: KvCapacity
    prompt_buffers: KvCapacity | None


@dataclass(frozen=True, slots=True)
class Beside:
    """A model that will be loaded into the same memory, a draft, with as many tokens in its cache."""

    manifest: Manifest
    graphs: GraphChoice


def plan_memory(
    manifest: Manifest,
    graphs: GraphChoice,
    config: SessionConfig,
    provider: ActiveProvider,
    device: DeviceMemory | None,
    beside: Beside | None = None,
) -> MemoryPlan:
    """Return the sizes of a session's caches.

    device: the memory of the device that holds the cache; None: the cache is in the host's.
    beside: what is not loaded yet and needs its part of the memory, and of the cache's; None: nothing.
    Raises ResourceError or UsageError if slots and context do not fit.
    """
    loaded = chosen_bytes(manifest, graphs, provider)
    if beside is not None:
        loaded += chosen_bytes(beside.manifest, beside.graphs, provider)
    available = psutil.virtual_memory().available if device is None else device.free_bytes()
    free = max(provider.memory_limit(available) - loaded, 0)
    if beside is not None:
        own, other = graphs.kv.bytes_per_token, beside.graphs.kv.bytes_per_token
        free = free * own // (own + other)
        if config.kv_cache_bytes is not None:
            config = replace(config, kv_cache_bytes=config.kv_cache_bytes * own // (own + other))
    capacity = fitting_capacity(manifest, graphs, config, free_bytes=free, whole=device is not None)
    return buffers_of(capacity, graphs, batch_invariant=config.batch_invariant)


def fitting_capacity(
    manifest: Manifest,
    graphs: GraphChoice,
    config: SessionConfig,
    *,
    free_bytes: int,
    lanes: int = 1,
    whole: bool = False,
) -> KvCapacity:
    """Return what sequences may use of free memory.

    lanes: how many prompts are under way at once, each in a cache of its own where they are converted.
    whole: see :func:`llorch_serve.cache.kv_cache.plan_capacity`, which says what is raised.
    """
    if graphs.converts_prompts:
        longest = config.max_context or manifest.context_length
        free_bytes -= min(lanes * manifest.kv.bytes_per_token * longest, free_bytes // 3)
    return plan_capacity(
        graphs.kv,
        slots=config.slots,
        context_length=manifest.context_length,
        max_context=config.max_context,
        free_bytes=free_bytes,
        cache_bytes=config.kv_cache_bytes,
        whole=whole,
    )


def buffers_of(capacity: KvCapacity, graphs: GraphChoice, *, batch_invariant: bool) -> MemoryPlan:
    """Return the sizes of the caches behind a capacity."""
    buffers = replace(capacity, slots=even(capacity.slots)) if batch_invariant else capacity
    of_prompt = replace(capacity, slots=even(1) if batch_invariant else 1)
    return MemoryPlan(capacity, buffers, of_prompt if graphs.converts_prompts else None)


def chosen_bytes(manifest: Manifest, graphs: GraphChoice, provider: ActiveProvider) -> int:
    """Return the memory that the chosen graphs take, loaded."""
    prompts = graphs.prompts
    return loaded_bytes(
        manifest,
        provider.runtime_name,
        weights=len(graphs.files),
        own_data=None if prompts is None else prompts.own_data,
    )


def widening_notice(manifest: Manifest) -> str | None:
    """Say that opening may take more memory than is free; None where it does not."""
    free = psutil.virtual_memory().available
    widened = manifest.widened_bytes or 0
    most = sum(entry.bytes for entry in manifest.files) + PASSING * widened
    if not widened or most <= free:
        return None
    return (
        f"opening this model takes up to {most / 2**30:.1f} GiB of memory for a moment, since its weights "
        f"are widened, and {free / 2**30:.1f} GiB are free; if the system ends the process, export the model "
        "again with --precision int8"
    )


def loaded_bytes(manifest: Manifest, provider: str, *, weights: int = 1, own_data: str | None = None) -> int:
    """Return the memory that the loaded files take. Unquantized weights in a type that the provider widens
    take twice their size.

    weights: graphs that are loaded over the first data file. Each holds the weights once more, as its kernels
        arrange them. A graph for prompts counts whole, although it has other weights too, which is a little
        too much.
    own_data: the file of weights of the graph for prompts, if it is loaded and has one.
    """
    not_shared = 0 if manifest.prompts is None else _file_bytes(manifest, manifest.prompts.data)
    widened = manifest.widened_bytes or 0
    stored = weights * (sum(entry.bytes for entry in manifest.files) - not_shared + widened)
    if own_data is not None:
        stored += _file_bytes(manifest, own_data)
    recipe = manifest.recipe
    unquantized = recipe.precision in ("fp16", "bf16")
    arithmetic = ARITHMETIC.get(provider, {}).get(recipe.compute_type)
    return stored * (2 if unquantized and arithmetic is Arithmetic.WIDENED else 1)


def _file_bytes(manifest: Manifest, name: str) -> int:
    return next(entry.bytes for entry in manifest.files if entry.path == name)
