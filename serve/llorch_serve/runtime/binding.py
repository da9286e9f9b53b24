"""From chosen graphs and planned sizes to graphs that run: caches allocated, graphs loaded and bound to them.

``opening.py`` decides; here onnxruntime's sessions are made, in the order in which errors should be told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import KvDtype, KvLayout, Recipe, cache_names
from llorch_serve.cache.device_buffers import DeviceBuffers
from llorch_serve.cache.device_cache import DeviceCache
from llorch_serve.cache.handoff import Handoff, Scales, read_scales
from llorch_serve.cache.kv_cache import KvCache, KvCapacity, SlotCache
from llorch_serve.cache.shared_device_cache import SharedDeviceCache
from llorch_serve.config import DEFAULT_PREFILL_CHUNK
from llorch_serve.errors import ArtifactError, ProviderError
from llorch_serve.providers import CPU, ActiveProvider, Memory, Placement, placement
from llorch_serve.providers.device_memory import DeviceMemory
from llorch_serve.providers.table import CUDA_GRAPHS
from llorch_serve.runtime.bound_graph import BoundGraph, LogitsBuffer
from llorch_serve.runtime.choosers import NONE, Choosers
from llorch_serve.runtime.device_graph import DeviceGraph
from llorch_serve.runtime.graph_choice import GraphChoice
from llorch_serve.runtime.graph_loading import check_signature, load_graph
from llorch_serve.runtime.late_graph import LateGraph
from llorch_serve.runtime.row_pairs import PairedGraph
from llorch_serve.runtime.score_memory import plain_fits
from llorch_serve.runtime.session import Graph, SessionGraphs
from llorch_serve.runtime.stage_graph import CrossingRows, Cut, StageGraph


@dataclass(frozen=True, slots=True)
class Binder:
    """Loads graphs of one artifact, or of one stage of it, on one provider and binds each to a cache.

    folder: where the graphs are loaded from.
    allow_cpu_nodes: nodes may run on the CPU where the provider does not take them. batch_invariant: see
        :class:`llorch_serve.config.SessionConfig`.
    cut: what crosses to and from the graphs' neighbours, where they are of a stage; None: they are whole.
    choosers: what finds tokens among the logits on a device.
    """

    artifact: Artifact
    folder: Path
    runtime: Any
    provider: ActiveProvider
    threads: int
    allow_cpu_nodes: bool
    batch_invariant: bool
    cut: Cut | None = None
    choosers: Choosers = NONE

    def load(
        self, path: Path, recipe: Recipe, kv_dtype: KvDtype, *, plain_attention: bool, packed: bool = True
    ) -> tuple[Placement, Any]:
        """Load a graph over a cache of a type; return where its nodes run, and onnxruntime's session.

        packed: see :func:`llorch_serve.runtime.graph_loading.load_graph`.
        Raises ArtifactError if the graph is damaged, ProviderError if the provider does not run it.
        """
        try:
            session = self._load(path, recipe, self.provider, plain=plain_attention, packed=packed)
        except ArtifactError as error:
            if self.provider.captures:
                self._require_recordable(path, recipe, error, plain=plain_attention)
            if self.folder == self.artifact.folder:
                raise
            raise ArtifactError(
                f"{error} Its weights are shared: remove {self.folder}, or leave --share-weights out"
            ) from error
        check_signature(self.artifact, path, session, kv_dtype)
        where = placement(
            session, self.provider.runtime_name, graph=path, allow_cpu_nodes=self.allow_cpu_nodes
        )
        return replace(where, device=self.provider.device), session

    def _load(
        self, path: Path, recipe: Recipe, provider: ActiveProvider, *, plain: bool, packed: bool = True
    ) -> Any:
        return load_graph(path, recipe, self.runtime, self.threads, provider, plain=plain, packed=packed)

    def _require_recordable(self, path: Path, recipe: Recipe, fault: ArtifactError, *, plain: bool) -> None:
        """Raise ProviderError if it is only recorded that a graph does not load, with the nodes that are
        elsewhere, as onnxruntime does not name them.
        """
        try:
            session = self._load(path, recipe, self.provider.without_captures(), plain=plain)
        except ArtifactError:
            return
        placement(session, self.provider.runtime_name, graph=path, allow_cpu_nodes=False)
        raise ProviderError(
            f"{fault} Its steps cannot be recorded; they are not with --provider-option {CUDA_GRAPHS}=0"
        ) from fault

    def bound(self, session: Any, cache: SlotCache, logits: LogitsBuffer, rows: CrossingRows | None) -> Graph:
        """Bind a loaded graph to a cache. logits: the buffer that it writes its logits to.

        rows: where a stage's graph finds what comes from the stage before; None: the graph is whole.
        """
        inputs = frozenset(spec.name for spec in self.artifact.manifest.inputs)
        in_place = self.provider.in_place
        graph: BoundGraph | StageGraph
        if self.cut is not None:
            assert rows is not None, "a stage has a place for what crosses to it"
            graph = StageGraph(session, inputs, cache, self.cut, rows, logits, in_place=in_place)
        elif isinstance(cache, SharedDeviceCache):
            return DeviceGraph(
                self.runtime, self.provider, session, inputs, cache, logits, choosers=self.choosers
            )
        else:
            graph = BoundGraph(session, inputs, cache, logits, in_place=in_place)
        if not self.batch_invariant:
            return graph
        assert isinstance(cache, KvCache)  # as the CPU's is
        return PairedGraph(graph, cache)


@dataclass(frozen=True, slots=True)
class LoadedGraphs:
    """The chosen graphs in the runtime, which may be bound to any number of caches.

    where: the nodes of the decoding one run. decode, prompts: onnxruntime's sessions; ``decode`` is None
        while it is left to be loaded, ``prompts`` where the other one takes them. scales: of an int8
        cache; None: there is none, or prompts are computed in it. load_decode: loads what was left to be
        loaded; None: nothing was.
    """

    choice: GraphChoice
    where: Placement
    decode: Any
    prompts: Any
    scales: Scales | None
    load_decode: Callable[[], Any] | None = None


def load_graphs(
    binder: Binder, graphs: GraphChoice, *, context: int, slots: int, prompts_first: bool = False
) -> LoadedGraphs:
    """Load the chosen graphs. Raises as :meth:`Binder.load`, of several errors that of the graph which
    decodes.

    context: tokens that a slot may hold. slots: most sequences in a call.
    prompts_first: load the graph for prompts, and see that the one that decodes is sound, which takes a
        quarter of its load; the rest is left to its first call. On the CPU.
    """
    artifact = binder.artifact
    manifest = artifact.manifest
    rows = slots if graphs.prompts is not None else max(slots, DEFAULT_PREFILL_CHUNK)
    plain = graphs.int8_cache is not None and plain_fits(manifest, rows=rows, context=context)
    late = prompts_first and graphs.prompts is not None and binder.provider.runtime_name == CPU

    def load_decode(*, packed: bool) -> tuple[Placement, Any]:
        path = binder.folder / graphs.decode.name
        return binder.load(path, graphs.decode.recipe, graphs.kv.dtype, plain_attention=plain, packed=packed)

    def load_prompts() -> Any:
        assert graphs.prompts is not None
        return binder.load(
            binder.folder / graphs.prompts.name,
            graphs.prompts.recipe,
            manifest.kv.dtype if graphs.int8_cache is not None else graphs.kv.dtype,
            plain_attention=plain_fits(manifest, rows=DEFAULT_PREFILL_CHUNK, context=context),
        )[1]

    with contextlib.ExitStack() as beside:
        prompts = load_prompts
        if late:
            threads = beside.enter_context(ThreadPoolExecutor(1, "prompts"))
            prompts = threads.submit(load_prompts).result
        where, decode = load_decode(packed=not late)
        _check_inputs(artifact, binder.cut)
        if graphs.prompts is None:
            return LoadedGraphs(graphs, where, decode, None, None)
        scales = None
        if graphs.int8_cache is not None:
            scales = read_scales(artifact.folder / graphs.int8_cache.scales, graphs.kv)
        loaded = LoadedGraphs(graphs, where, decode, prompts(), scales)
    return replace(loaded, decode=None, load_decode=lambda: load_decode(packed=True)[1]) if late else loaded


def bind_graphs(
    binder: Binder,
    loaded: LoadedGraphs,
    cache: SlotCache,
    logits: LogitsBuffer,
    *,
    prompt_buffers: KvCapacity | None,
    rows: CrossingRows | None = None,
) -> SessionGraphs:
    """Bind loaded graphs to one cache. prompt_buffers: of the cache that prompts are computed in; None: they
    are computed in ``cache``. rows: as in :meth:`Binder.bound`.
    """

    def bound(session: Any) -> Graph:
        return binder.bound(session, cache, logits, rows)

    late = loaded.load_decode
    decode = bound(loaded.decode) if late is None else LateGraph(late, bound)
    if loaded.prompts is None:
        chooses = decode if isinstance(decode, DeviceGraph) and decode.chooses else None
        return SessionGraphs(decode, decode, None, chooses)
    handoff = None
    if loaded.scales is not None:
        assert prompt_buffers is not None
        assert isinstance(cache, KvCache)  # a cache in int8 is of the CPU's target alone
        handoff = Handoff(KvCache(binder.artifact.manifest.kv, prompt_buffers), cache, loaded.scales)
    prompts = binder.bound(loaded.prompts, cache if handoff is None else handoff.prompt, logits, rows)
    return SessionGraphs(decode, prompts, handoff)


def make_cache(
    kv: KvLayout, capacity: KvCapacity, runtime: Any, provider: ActiveProvider, memory: DeviceMemory | None
) -> SlotCache:
    """Allocate the slots' keys and values where a provider wants them.

    memory: of the device; None: it cannot be addressed, or there is none.
    """
    if memory is not None:
        return SharedDeviceCache(kv, capacity, DeviceBuffers(runtime, provider), memory)
    if provider.memory is Memory.DEVICE:
        return DeviceCache(kv, capacity, runtime, provider)
    return KvCache(kv, capacity)


_FILLED: Final = frozenset({"input_ids", "seqlens_k", "total_sequence_length", "logits_indices"})
"""Inputs that a session fills, beside the past. ``seqlens_k`` is each row's length in all, minus one."""


def _check_inputs(artifact: Artifact, cut: Cut | None) -> None:
    """Raise ArtifactError if the graph has an input that no session fills. cut: see :class:`Binder`."""
    kv = artifact.manifest.kv
    filled = _FILLED if cut is None else _FILLED | set(cut.takes)
    if odd := sorted({spec.name for spec in artifact.manifest.inputs} - filled - cache_names(kv)):
        raise ArtifactError(
            f"{artifact.graph_path} has the inputs {', '.join(odd[:5])}, which this llorch does not fill; "
            f"it fills {', '.join(sorted(_FILLED))} and the past. Export the model again, or upgrade llorch"
        )
