"""Which of an artifact's graphs a session loads, and over which cache.

Input: the manifest and the session's configuration. Output: a :class:`GraphChoice`, which is data alone.
Neither onnxruntime nor a file is touched, so every choice can be tested with a manifest.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from llorch_serve.artifact.manifest import Int8Cache, KvDtype, KvLayout, Manifest, Recipe
from llorch_serve.config import SessionConfig
from llorch_serve.errors import UsageError


@dataclass(frozen=True, slots=True)
class GraphFile:
    """One graph to load.

    name: its file in the artifact's folder. recipe: how its weights are stored.
    own_data: the file of weights that no other graph has; None: it has none.
    """

    name: str
    recipe: Recipe
    own_data: str | None = None


@dataclass(frozen=True, slots=True)
class GraphChoice:
    """What a session runs.

    kv: layout of the cache that running sequences read.
    decode: the graph that advances running sequences. prompts: the one for prompts; None: ``decode`` takes
        them.
    int8_cache: how keys and values are stored in int8; None: the cache has the type that the artifact
        computes in.
    """

    kv: KvLayout
    decode: GraphFile
    prompts: GraphFile | None
    int8_cache: Int8Cache | None

    @property
    def files(self) -> tuple[GraphFile, ...]:
        """All graphs that are loaded."""
        return (self.decode,) if self.prompts is None else (self.decode, self.prompts)

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The recipes of all graphs that are loaded."""
        return tuple(file.recipe for file in self.files)

    @property
    def prompt_recipe(self) -> Recipe:
        """The recipe of the graph that takes prompts."""
        return self.files[-1].recipe

    @property
    def converts_prompts(self) -> bool:
        """Whether prompts are computed over a cache of their own and then converted to int8."""
        return self.prompts is not None and self.int8_cache is not None


def choose_graphs(manifest: Manifest, config: SessionConfig) -> GraphChoice:
    """Return the graphs of a manifest that a configuration asks for.

    Raises UsageError if the artifact has no graph for the cache's type, or if --single-graph has no effect.
    """
    kv = msgspec.structs.replace(manifest.kv, dtype=_cache_dtype(manifest, config))
    int8 = manifest.int8_cache if kv.dtype == "int8" else None
    if config.single_graph and int8 is None and manifest.prompts is None:
        raise UsageError(
            "--single-graph has no effect here: prompts and answers run on one graph; leave it out"
        )
    first = GraphFile(manifest.graph, manifest.recipe)
    decode = first if int8 is None else GraphFile(int8.decode_graph, manifest.recipe)
    prompts = None
    if not config.single_graph:
        if (own := manifest.prompts) is not None:
            prompts = GraphFile(own.graph, own.recipe, own.data)
        elif int8 is not None:
            prompts = first
    return GraphChoice(kv, decode, prompts, int8)


def _cache_dtype(manifest: Manifest, config: SessionConfig) -> KvDtype:
    """Return what the cache holds. Raises UsageError if the artifact has no graph for it."""
    if config.kv_dtype is not None and config.kv_dtype not in manifest.kv_dtypes:
        raise UsageError(
            f"--kv-dtype is {config.kv_dtype}; this artifact has graphs for "
            f"{' and '.join(manifest.kv_dtypes)}. "
            "Export it with --kv-dtype int8 for a cache in int8, or in another --compute-type"
        )
    return config.kv_dtype or manifest.kv_dtypes[0]
