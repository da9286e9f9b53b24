"""Opening a session on another tool's folder: the graph is loaded, memory planned, and the kind of cache
chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import psutil

from llorch_serve.cache.kv_cache import KvCapacity, plan_capacity
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError, ProviderError, UsageError
from llorch_serve.foreign.graph import LoadedGraph, load_graph
from llorch_serve.foreign.growing import GrowingSession, plan_growing
from llorch_serve.foreign.model import ForeignModel
from llorch_serve.foreign.shared import SharedSession, layout
from llorch_serve.providers import usable_cpus
from llorch_serve.providers.table import find_provider
from llorch_serve.runtime.opening import LoadReport


def open_foreign(
    model: ForeignModel, config: SessionConfig, report: Callable[[LoadReport], None]
) -> SharedSession | GrowingSession:
    """Load a folder's graph and make its cache.

    Raises ProviderError if the runtime is missing or another provider than the CPU's is asked for,
    ArtifactError if the graph is not what its folder says, UsageError for settings without effect,
    ResourceError or UsageError if slots and context do not fit.
    """
    _check_settings(model, config)
    _check_provider(model, config)
    free = max(psutil.virtual_memory().available - model.total_bytes, 0)
    threads = config.threads or usable_cpus()
    graph = load_graph(model, threads)
    plan = _plan_shared if model.shared_cache else _plan_growing
    capacity = plan(model, graph, config, free)
    report(LoadReport(threads, capacity, capacity.notice(model.manifest.context_length)))
    kind = SharedSession if model.shared_cache else GrowingSession
    return kind(model, graph, capacity)


def _check_settings(model: ForeignModel, config: SessionConfig) -> None:
    """Raise UsageError for settings without effect."""
    chosen = config.provider
    of_graph = "which is one graph over a cache of its own type"
    of_provider = "which runs on the cpu provider as it is"
    for flag, given, why in (
        ("--kv-dtype", config.kv_dtype is not None, of_graph),
        ("--single-graph", config.single_graph, of_graph),
        ("--batch-invariant", config.batch_invariant, of_graph),
        ("--ep-library", chosen.library is not None, of_provider),
        ("--provider-option", bool(chosen.options), of_provider),
        ("--allow-cpu-nodes", chosen.allow_cpu_nodes, of_provider),
    ):
        if given:
            raise UsageError(f"{flag} has no effect on {model.graph_path}, {why}; leave it out")


def _check_provider(model: ForeignModel, config: SessionConfig) -> None:
    """Raise ProviderError if another provider than the CPU's is asked for."""
    name = config.provider.name
    if name is not None and (row := find_provider(name)).name != "cpu":
        raise ProviderError(
            f"--provider {row.name} is for llorch's own artifacts; {model.graph_path} runs on the cpu "
            f"provider"
        )


def _plan_shared(
    model: ForeignModel, graph: LoadedGraph, config: SessionConfig, free_bytes: int
) -> KvCapacity:
    """Return the size of a cache of ours that the graph reads and writes in place."""
    if graph.cache_type is not np.float32:
        raise ArtifactError(
            f"{model.graph_path} keeps float16 keys and values in a shared buffer, expected float32; "
            "build it for the cpu provider with int4 or fp32"
        )
    return plan_capacity(
        layout(model),
        slots=config.slots,
        context_length=model.manifest.context_length,
        max_context=config.max_context,
        free_bytes=free_bytes,
        cache_bytes=config.kv_cache_bytes,
    )


def _plan_growing(
    model: ForeignModel, graph: LoadedGraph, config: SessionConfig, free_bytes: int
) -> KvCapacity:
    """Return the size of a cache whose tensors the graph returns anew, and longer, from every call."""
    if config.kv_cache_bytes is not None:
        raise UsageError(
            f"--kv-cache-memory has no effect on {model.graph_path}, whose cache grows outside llorch; "
            f"leave it out"
        )
    return plan_growing(
        model,
        np.dtype(graph.cache_type).itemsize,
        slots=config.slots,
        max_context=config.max_context,
        free_bytes=free_bytes,
    )
