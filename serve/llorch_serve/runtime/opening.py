"""Opening an artifact: its graphs are chosen, memory is planned, then the graphs are loaded and bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from llorch_serve.providers.device_memory import device_memory
from llorch_serve.runtime.binding import Binder, bind_graphs, load_graphs, make_cache
from llorch_serve.runtime.bound_graph import LogitsBuffer
from llorch_serve.runtime.graph_choice import GraphChoice, choose_graphs
from llorch_serve.runtime.heap import give_back_freed
from llorch_serve.runtime.memory_plan import Beside, plan_memory, widening_notice
from llorch_serve.runtime.operator_check import attention_rows, too_many_rows
from llorch_serve.runtime.row_pairs import require_effect, takes_pairs
from llorch_serve.runtime.session import DecoderSession
from llorch_serve.runtime.shared_weights import SharedGraphs, shared_graphs


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
    beside: Beside | None = None,
) -> DecoderSession:
    """Load the artifact's graphs and allocate its KV cache. beside: what memory is left for; None: nothing.

    Raises ProviderError if the runtime is missing, cannot compute in the artifact's type or will not run the
    graph, ArtifactError if the graph is damaged, ResourceError or UsageError if slots and context do not fit.
    """
    manifest = artifact.manifest
    _check_layout(artifact)
    if config.provider == ProviderChoice():  # what the table says of the CPU needs no runtime
        _check_fit(manifest, CPU)
    graphs = choose_graphs(manifest, config)
    runtime = import_runtime(manifest.min_onnxruntime)
    provider = activate(config.provider, runtime)
    _check_fit(manifest, provider.runtime_name)
    if graphs.int8_cache is not None:
        import_runtime(graphs.int8_cache.min_onnxruntime, instead=f"or use --kv-dtype {manifest.kv.dtype}")
    on_cpu, has_experts = provider.runtime_name == CPU, bool(manifest.model.experts)
    if config.batch_invariant:
        require_effect(graphs.recipes, on_cpu=on_cpu, has_experts=has_experts)
    memory = device_memory(provider, runtime)
    plan = plan_memory(manifest, graphs, config, provider, memory, beside)
    threads = config.threads or usable_cpus()
    lying = _where_graphs_lie(artifact, graphs, config, runtime, provider)
    max_rows, few_rows = (None, None) if on_cpu else _limited_rows(runtime, provider, threads)
    own = plan.capacity.notice(manifest.context_length)
    notices = filter(None, (own, few_rows, widening_notice(manifest), lying.notice))
    report(LoadReport(threads, plan.capacity, "; ".join(notices) or None))

    logits = LogitsBuffer(plan.buffers.slots, manifest.model.vocab_size)
    binder = Binder(
        artifact,
        lying.folder,
        runtime,
        provider,
        threads,
        allow_cpu_nodes=config.provider.allow_cpu_nodes,
        batch_invariant=config.batch_invariant,
    )
    cache = make_cache(graphs.kv, plan.buffers, runtime, provider, memory)
    loaded = load_graphs(binder, graphs, context=plan.capacity.context)
    bound = bind_graphs(binder, loaded, cache, logits, prompt_buffers=plan.prompt_buffers)
    if manifest.widened_bytes:
        give_back_freed()
    return DecoderSession(
        artifact,
        loaded.where,
        cache,
        bound,
        capacity=plan.capacity,
        batch_invariant=on_cpu
        and not has_experts
        and (config.batch_invariant or not any(map(takes_pairs, graphs.recipes))),
        max_rows=max_rows,
        needs_one_logits_row=graphs.prompt_recipe.multiplies_bytes and not takes_no_rows(runtime),
    )


def _where_graphs_lie(
    artifact: Artifact, graphs: GraphChoice, config: SessionConfig, runtime: Any, provider: ActiveProvider
) -> SharedGraphs:
    """Return the folder that the chosen graphs are loaded from: the artifact's, or one with weights that
    processes share. Raises UsageError if that is asked for and has no effect.
    """
    if not config.share_weights:
        return SharedGraphs(artifact.folder)
    if provider.runtime_name != CPU:
        raise UsageError(
            f"--share-weights has no effect on weights that {provider.runtime_name} holds; leave it out"
        )
    recipes = {file.name: file.recipe for file in graphs.files}
    return shared_graphs(artifact, recipes, runtime, config.threads or usable_cpus())


def _limited_rows(runtime: Any, provider: ActiveProvider, threads: int) -> tuple[int | None, str | None]:
    """Return the most rows of attention that a provider computes rightly, and a notice; None: any number."""
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
