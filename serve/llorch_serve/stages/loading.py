"""One stage on its way into this process: its graphs chosen, its provider ready, then loaded for all lanes.

Between the two the lanes are planned, by what every stage has room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Final

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import Manifest, cache_names
from llorch_serve.artifact.stages import stage_artifacts
from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError
from llorch_serve.providers import CPU, ProviderChoice, activate, import_runtime, takes_no_rows
from llorch_serve.providers.device_memory import device_memory
from llorch_serve.runtime import huge_pages
from llorch_serve.runtime.binding import Binder, bind_graphs, load_graphs, make_cache
from llorch_serve.runtime.bound_graph import Logits, LogitsBuffer
from llorch_serve.runtime.graph_choice import choose_graphs
from llorch_serve.runtime.heap import give_back_freed
from llorch_serve.runtime.memory_plan import buffers_of
from llorch_serve.runtime.operator_check import attention_rows
from llorch_serve.runtime.score_memory import most_rows
from llorch_serve.runtime.stage_graph import CrossingRows, Cut
from llorch_serve.stages.stage import LanePart, Stage, StageFacts

_LOGITS: Final = "logits"


@dataclass(frozen=True, slots=True)
class StageSettings:
    """Which stage, of what, and how it runs.

    config: of the whole model; its provider is this stage's, and its threads are what this stage may use.
    gather: its process has weights of nothing else, and gathers them into huge pages as ``config`` says.
    """

    artifact: Artifact
    number: int
    config: SessionConfig
    threads: int
    gather: bool = False


@dataclass(frozen=True, slots=True)
class StageRoom:
    """What a stage finds where it is to run.

    free_bytes: of the device that its cache lies on; None: that is the host's memory.
    max_rows: see :class:`llorch_serve.stages.stage.StageFacts`.
    host, host_bytes: the machine that it runs on and what of its memory is free; None: the worker's own.
    """

    free_bytes: int | None
    max_rows: int | None
    host: str | None = None
    host_bytes: int | None = None


class StageLoader:
    """Loads one stage.

    Raises ProviderError if the runtime is missing or too old, UsageError for what the artifact has no graph
    for.
    """

    def __init__(self, settings: StageSettings) -> None:
        config = settings.config
        self._settings = settings
        self._view = stage_artifacts(settings.artifact)[settings.number]
        self._graphs = choose_graphs(self._view.manifest, config)
        self._runtime = import_runtime(self._view.manifest.min_onnxruntime)
        self._provider = activate(config.provider, self._runtime)
        self._memory = device_memory(self._provider, self._runtime)
        self._max_rows: int | None = None

    def room(self) -> StageRoom:
        """Return what is free, and how many rows the provider computes rightly."""
        if self._provider.runtime_name != CPU:
            self._max_rows = attention_rows(self._runtime, self._provider, self._settings.threads)
        memory = self._memory
        free = None if memory is None else self._provider.memory_limit(memory.free_bytes())
        return StageRoom(free, self._max_rows)

    def load(self, lanes: Sequence[KvCapacity], shared: Sequence[Logits] = ()) -> Stage:
        """Load the graphs and allocate a cache for each lane.

        lanes: what each may hold. shared: for each, memory that the last stage writes logits to; empty: there
            is none.

        Raises ArtifactError if a graph is damaged, ProviderError if the provider does not run it,
        ResourceError if memory does not suffice.
        """
        view, config = self._view, self._settings.config
        binder = Binder(
            view,
            view.folder,
            self._runtime,
            self._provider,
            self._settings.threads,
            allow_cpu_nodes=config.provider.allow_cpu_nodes,
            batch_invariant=config.batch_invariant,
            cut=cut_of(view.manifest, f"{view.folder}, stage {self._settings.number}"),
        )
        assert binder.cut is not None
        plans = [buffers_of(lane, self._graphs, batch_invariant=config.batch_invariant) for lane in lanes]
        caches = [
            make_cache(self._graphs.kv, plan.buffers, self._runtime, self._provider, self._memory)
            for plan in plans
        ]
        most = max(plan.buffers.slots for plan in plans)
        loaded = load_graphs(binder, self._graphs, context=lanes[0].context, slots=most)
        last = not binder.cut.gives
        parts = []
        for plan, cache, memory in zip_longest(plans, caches, shared[: len(plans)]):
            rows_of_logits = plan.buffers.slots if last else 0
            logits = LogitsBuffer(rows_of_logits, view.manifest.model.vocab_size, memory)
            rows = CrossingRows()
            graphs = bind_graphs(binder, loaded, cache, logits, prompt_buffers=plan.prompt_buffers, rows=rows)
            parts.append(LanePart(cache, graphs, rows, gives_logits=last))
        if view.manifest.widened_bytes:
            give_back_freed()
        if self._settings.gather and loaded.where.device == "cpu" and config.huge_pages is not False:
            huge_pages.gather()
        multiplies = self._graphs.prompt_recipe.multiplies_bytes
        on_cpu = self._provider.runtime_name == CPU
        max_rows = most_rows(view.manifest, self._graphs, lanes[0].context) if on_cpu else self._max_rows
        return Stage(
            parts,
            StageFacts(
                loaded.where,
                batched=caches[0].takes_batches,
                max_rows=max_rows,
                needs_one_logits_row=multiplies and not takes_no_rows(self._runtime),
            ),
        )


def cut_of(manifest: Manifest, origin: str) -> Cut:
    """Return what crosses to and from a stage. manifest: as of one graph, the stage's. origin: names it.

    Raises ArtifactError for tensors that are not rows of one width and type.
    """
    cache = cache_names(manifest.kv)
    taken = [spec for spec in manifest.inputs if spec.name not in cache and len(spec.shape) == 3]
    given = [spec for spec in manifest.outputs if spec.name not in cache and spec.name != _LOGITS]
    kinds = {(spec.dtype, spec.shape[2:]) for spec in (*taken, *given)}
    match sorted(kinds):
        case [("float32" | "float16" | "bfloat16" as dtype, (int(width),))]:
            return Cut(tuple(s.name for s in taken), tuple(s.name for s in given), width, dtype)
    raise ArtifactError(
        f"{origin}: what crosses is {sorted(map(str, kinds))[:3]}; expected rows of one width and type, "
        f"[batch, tokens, width]. Export the model again, or upgrade llorch"
    )


def on_device(choice: ProviderChoice, option: str, device: int) -> ProviderChoice:
    """Return the same provider on one of its devices. option: by which it is told."""
    return replace(choice, options=(*choice.options, f"{option}={device}"))
