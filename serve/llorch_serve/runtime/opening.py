"""Opening an artifact: its graphs are chosen, memory is planned, then the graphs are loaded and bound."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import Manifest
from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.providers import (
    CPU,
    ActiveProvider,
    ProviderChoice,
    activate,
    check_target,
    import_runtime,
    require_arithmetic,
    takes_no_rows,
    usable_cpus,
)
from llorch_serve.providers.device_memory import DeviceMemory, device_memory
from llorch_serve.providers.recording_turns import TURNS
from llorch_serve.providers.table import CUDA_GRAPHS
from llorch_serve.runtime.binding import Binder, bind_graphs, load_graphs, make_cache
from llorch_serve.runtime.bound_graph import LogitsBuffer
from llorch_serve.runtime.choosers import open_choosers
from llorch_serve.runtime.graph_choice import GraphChoice, choose_graphs
from llorch_serve.runtime.heap import give_back_freed
from llorch_serve.runtime.memory_plan import Beside, plan_memory, widening_notice
from llorch_serve.runtime.row_pairs import require_effect, takes_pairs
from llorch_serve.runtime.score_memory import most_rows
from llorch_serve.runtime.session import DecoderSession


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What opening a session decided. notice: something a person should read, or None."""

    threads: int
    capacity: KvCapacity
    notice: str | None


def open_session(
    artifact: Artifact,
    config: SessionConfig,
    report: Callable[[LoadReport], None],
    *,
    prompts_first: bool = False,
    beside: Beside | None = None,
) -> DecoderSession:
    """Load the artifact's graphs and allocate its KV cache. prompts_first: see
    :func:`llorch_serve.runtime.binding.load_graphs`. beside: what memory is left for; None: nothing.

    Raises ProviderError if the runtime is missing, cannot compute in the artifact's type or will not run the
    graph, ArtifactError if the graph is damaged, ResourceError or UsageError if slots and context do not fit.
    """
    _check_layout(artifact)
    manifest = artifact.manifest
    if config.provider == ProviderChoice():  # what the table says of the CPU needs no runtime
        _check_fit(manifest, CPU)
    graphs = choose_graphs(manifest, config)
    runtime, provider, memory, unrecorded = _activated(manifest, graphs, config)
    invariant = _is_batch_invariant(manifest, graphs, config, provider)
    # Loading calls CUDA, as no thread may while another one records.
    with TURNS.call() if memory is not None else contextlib.nullcontext():
        plan = plan_memory(manifest, graphs, config, provider, memory, beside)
        threads = config.threads or usable_cpus()
        folder, not_shared = _where_graphs_lie(artifact, graphs, config, runtime, provider)
        context = plan.capacity.context
        most = most_rows(manifest, graphs, context)
        max_rows, few_rows = _limited_rows(runtime, provider, threads, on_cpu=most)
        choosers, on_host = open_choosers(runtime, provider, manifest.model, on_device=memory is not None)
        own, widened = plan.capacity.notice(manifest.context_length), widening_notice(manifest)
        notices = "; ".join(filter(None, (own, few_rows, unrecorded, on_host, widened, not_shared)))
        report(LoadReport(threads, plan.capacity, notices or None))
        binder = Binder(
            artifact,
            folder,
            runtime,
            provider,
            threads,
            allow_cpu_nodes=config.provider.allow_cpu_nodes,
            batch_invariant=config.batch_invariant,
            choosers=choosers,
        )
        cache = make_cache(graphs.kv, plan.buffers, runtime, provider, memory)
        slots = plan.buffers.slots
        loaded = load_graphs(binder, graphs, context=context, slots=slots, prompts_first=prompts_first)
        logits = LogitsBuffer(slots, manifest.model.vocab_size)
        bound = bind_graphs(binder, loaded, cache, logits, prompt_buffers=plan.prompt_buffers)
        if manifest.widened_bytes:
            give_back_freed()
        return DecoderSession(
            artifact,
            loaded.where,
            cache,
            bound,
            capacity=plan.capacity,
            batch_invariant=invariant,
            max_rows=max_rows,
            needs_one_logits_row=graphs.prompt_recipe.multiplies_bytes and not takes_no_rows(runtime),
        )


def _activated(
    manifest: Manifest, graphs: GraphChoice, config: SessionConfig
) -> tuple[Any, ActiveProvider, DeviceMemory | None, str | None]:
    """Return the runtime, the provider, the memory of its device, and why it records no calls, if it was
    to.
    """
    runtime = import_runtime(manifest.min_onnxruntime)
    provider = activate(config.provider, runtime)
    _check_fit(manifest, provider.runtime_name)
    provider, unrecorded = _recording(provider, config)
    if graphs.int8_cache is not None:
        import_runtime(graphs.int8_cache.min_onnxruntime, instead=f"or use --kv-dtype {manifest.kv.dtype}")
    return runtime, provider, device_memory(provider, runtime), unrecorded


def _where_graphs_lie(
    artifact: Artifact, graphs: GraphChoice, config: SessionConfig, runtime: Any, provider: ActiveProvider
) -> tuple[Path, str | None]:
    """Return the folder that the chosen graphs are loaded from: the artifact's, or one with weights that
    processes share; and why they are not shared after all, if that was asked for. Raises UsageError if it has
    no effect.
    """
    if not config.share_weights:
        return artifact.folder, None
    if provider.runtime_name != CPU:
        raise UsageError(
            f"--share-weights has no effect on weights that {provider.runtime_name} holds; leave it out"
        )
    from llorch_serve.runtime.shared_weights import shared_graphs

    recipes = {file.name: file.recipe for file in graphs.files}
    shared = shared_graphs(artifact, recipes, runtime, config.threads or usable_cpus())
    return shared.folder, shared.notice


def _recording(provider: ActiveProvider, config: SessionConfig) -> tuple[ActiveProvider, str | None]:
    """Return the provider as steps are to be made, and a notice where it could record them and does not."""
    recorded = provider.with_captures()
    if recorded is provider or not config.provider.allow_cpu_nodes:
        return recorded, None
    return provider, (
        f"steps are not recorded, as some nodes may run on the CPU; --provider-option {CUDA_GRAPHS}=1 "
        "records them where none does"
    )


def _is_batch_invariant(
    manifest: Manifest, graphs: GraphChoice, config: SessionConfig, provider: ActiveProvider
) -> bool:
    """Return whether a sequence's bits are the same beside any others. Raises UsageError where they are to
    be, and cannot.
    """
    on_cpu, has_experts = provider.runtime_name == CPU, bool(manifest.model.experts)
    if config.batch_invariant:
        require_effect(graphs.recipes, on_cpu=on_cpu, has_experts=has_experts)
    pairs = not config.batch_invariant and any(map(takes_pairs, graphs.recipes))
    return on_cpu and not has_experts and not pairs


def _limited_rows(
    runtime: Any, provider: ActiveProvider, threads: int, *, on_cpu: int | None
) -> tuple[int | None, str | None]:
    """Return the most rows of attention that a call may have, and a notice; None: any number.

    on_cpu: those for whose scores there is memory. Elsewhere it is those that a provider computes rightly.
    """
    if provider.runtime_name == CPU:
        return on_cpu, None
    from llorch_serve.runtime.operator_check import attention_rows, too_many_rows

    rows = attention_rows(runtime, provider, threads)
    return rows, None if rows is None else f"{provider.runtime_name}: {too_many_rows(rows)}"


def _check_layout(artifact: Artifact) -> None:
    if artifact.manifest.embeds is not None:
        raise ArtifactError(
            f"{artifact.folder} holds a graph that embeds texts; expected one that gives logits. It goes "
            f"with llorch embed, serve, inspect and verify --against; for logits export the checkpoint with "
            f"--embed none"
        )
    if stages := artifact.manifest.stages:
        raise ArtifactError(
            f"{artifact.folder} holds a model in {len(stages)} stages; expected one graph of all layers. "
            f"Stages go with llorch generate, serve, bench, score and verify; export the model "
            f"without --stages for this"
        )
    if artifact.manifest.layout != "llorch":
        raise ArtifactError(
            f"{artifact.folder} holds a graph of {artifact.kind.value}'s, which this command does not run; "
            "expected one of llorch's own. Such a graph goes with llorch generate, serve, bench and verify "
            "--against"
        )


def _check_fit(manifest: Manifest, provider: str) -> None:
    check_target(manifest.target, provider)
    require_arithmetic(provider, (manifest.recipe.compute_type,))
