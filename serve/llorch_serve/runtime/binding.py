"""From chosen graphs and planned sizes to graphs that run: caches allocated, graphs loaded and bound to them.

``opening.py`` decides; here onnxruntime's sessions are made, in the order in which errors should be told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import KvLayout, Recipe, cache_names
from llorch_serve.cache.device_buffers import DeviceBuffers
from llorch_serve.cache.device_cache import DeviceCache
from llorch_serve.cache.handoff import Handoff, read_scales
from llorch_serve.cache.kv_cache import KvCache, KvCapacity, SlotCache
from llorch_serve.cache.shared_device_cache import SharedDeviceCache
from llorch_serve.config import DEFAULT_PREFILL_CHUNK
from llorch_serve.errors import ArtifactError
from llorch_serve.providers import ActiveProvider, Memory, Placement, placement
from llorch_serve.providers.device_memory import DeviceMemory
from llorch_serve.runtime.bound_graph import BoundGraph, LogitsBuffer
from llorch_serve.runtime.device_graph import DeviceGraph
from llorch_serve.runtime.graph_choice import GraphChoice
from llorch_serve.runtime.graph_loading import check_signature, load_graph
from llorch_serve.runtime.memory_plan import MemoryPlan
from llorch_serve.runtime.row_pairs import PairedGraph
from llorch_serve.runtime.session import Graph, SessionGraphs

_MAX_SCORE_BYTES: Final = 2**28
"""Bytes of attention scores that the plain kernel may hold at once. In longer contexts prompts take the
kernel that works in tiles.
"""


@dataclass(frozen=True, slots=True)
class Binder:
    """Loads graphs of one artifact on one provider and binds each to a cache.

    folder: where the graphs are loaded from.
    logits: the buffer that all graphs write their logits to. allow_cpu_nodes: nodes may run on the CPU where
        the provider does not take them. batch_invariant: see
        :class:`llorch_serve.config.SessionConfig`.
    """

    artifact: Artifact
    folder: Path
    runtime: Any
    provider: ActiveProvider
    threads: int
    logits: LogitsBuffer
    allow_cpu_nodes: bool
    batch_invariant: bool

    def bind(
        self, path: Path, recipe: Recipe, cache: SlotCache, *, plain_attention: bool
    ) -> tuple[Placement, Graph]:
        """Load a graph and bind it to a cache; return where its nodes run, and the graph.

        Raises ArtifactError if the graph is damaged, ProviderError if the provider does not run it.
        """
        try:
            session = load_graph(
                path, recipe, self.runtime, self.threads, self.provider, plain=plain_attention
            )
        except ArtifactError as error:
            if self.folder == self.artifact.folder:
                raise
            raise ArtifactError(
                f"{error} Its weights are shared: remove {self.folder}, or leave --share-weights out"
            ) from error
        check_signature(self.artifact, path, session, cache.kv.dtype)
        where = placement(
            session, self.provider.runtime_name, graph=path, allow_cpu_nodes=self.allow_cpu_nodes
        )
        return replace(where, device=self.provider.device), self._bound(session, cache)

    def _bound(self, session: Any, cache: SlotCache) -> Graph:
        inputs = frozenset(spec.name for spec in self.artifact.manifest.inputs)
        if isinstance(cache, SharedDeviceCache):
            buffers = DeviceBuffers(self.runtime, self.provider)
            captured = self.provider.captures
            return DeviceGraph(self.runtime, session, inputs, cache, buffers, self.logits, captured=captured)
        graph = BoundGraph(session, inputs, cache, self.logits, in_place=self.provider.in_place)
        if not self.batch_invariant:
            return graph
        assert isinstance(cache, KvCache)  # as the CPU's is
        return PairedGraph(graph, cache)


def bind_graphs(
    binder: Binder, graphs: GraphChoice, plan: MemoryPlan, cache: SlotCache
) -> tuple[Placement, SessionGraphs]:
    """Load the chosen graphs over a session's cache; return where the decoding one runs, and all of them.

    Raises as :meth:`Binder.bind`.
    """
    artifact = binder.artifact
    manifest, folder = artifact.manifest, artifact.folder
    where, decode = binder.bind(
        binder.folder / graphs.decode.name,
        graphs.decode.recipe,
        cache,
        plain_attention=graphs.int8_cache is not None,
    )
    _check_inputs(artifact)
    if graphs.prompts is None:
        return where, SessionGraphs(decode, decode, None)
    handoff = None
    if graphs.int8_cache is not None:
        assert plan.prompt_buffers is not None
        assert isinstance(cache, KvCache)  # a cache in int8 is of the CPU's target alone
        scales = read_scales(folder / graphs.int8_cache.scales, graphs.kv)
        handoff = Handoff(KvCache(manifest.kv, plan.prompt_buffers), cache, scales)
    score_bytes = 4 * manifest.model.num_attention_heads * DEFAULT_PREFILL_CHUNK * plan.capacity.context
    _, prompts = binder.bind(
        binder.folder / graphs.prompts.name,
        graphs.prompts.recipe,
        cache if handoff is None else handoff.prompt,
        plain_attention=score_bytes <= _MAX_SCORE_BYTES,
    )
    return where, SessionGraphs(decode, prompts, handoff)


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


def _check_inputs(artifact: Artifact) -> None:
    """Raise ArtifactError if the graph has an input that no session fills."""
    kv = artifact.manifest.kv
    if odd := sorted({spec.name for spec in artifact.manifest.inputs} - _FILLED - cache_names(kv)):
        raise ArtifactError(
            f"{artifact.graph_path} has the inputs {', '.join(odd[:5])}, which this llorch does not fill; "
            f"it fills {', '.join(sorted(_FILLED))} and the past. Export the model again, or upgrade llorch"
        )
