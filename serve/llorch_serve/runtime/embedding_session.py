"""A loaded graph that gives a vector for each text.

Input: token ids of several texts; output: float32 [texts, hidden_size]. Texts of one call are padded to the
longest of them, which changes none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psutil

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import Manifest
from llorch_serve.cache.kv_cache import MEMORY_SHARE, KvCapacity
from llorch_serve.config import SessionConfig
from llorch_serve.engine.embedding import BATCH_TOKENS
from llorch_serve.errors import ArtifactError, ProviderError, ResourceError, UsageError
from llorch_serve.providers import (
    Placement,
    activate,
    check_target,
    import_runtime,
    placement,
    require_arithmetic,
    require_unrecorded,
    usable_cpus,
)
from llorch_serve.runtime.graph_loading import check_signature, load_graph
from llorch_serve.runtime.heap import give_back_freed
from llorch_serve.runtime.memory_plan import loaded_bytes, widening_notice
from llorch_serve.runtime.opening import LoadReport

_INPUTS: Final = frozenset({"input_ids", "seqlens_k", "total_sequence_length"})
_OUTPUT: Final = "embeddings"


class EmbeddingSession:
    """Runs one graph. context: most tokens of a text. placement: where the nodes run."""

    def __init__(self, session: Any, where: Placement, *, context: int) -> None:
        self._session = session
        self.placement = where
        self.context = context

    def embed(self, texts: Seq[Seq[int]]) -> npt.NDArray[np.float32]:
        """Return a vector for each text, which has at least one token and at most ``context``.

        Raises ProviderError if the runtime fails, ResourceError where memory was short.
        """
        longest = max(map(len, texts))
        ids = np.zeros((len(texts), longest), np.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
        feeds = {
            "input_ids": ids,
            "seqlens_k": np.array([len(text) - 1 for text in texts], np.int32),
            "total_sequence_length": np.array(longest, np.int32),
        }
        try:
            found: npt.NDArray[np.float32] = self._session.run([_OUTPUT], feeds)[0]
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            if "alloc" in said.lower():
                raise ResourceError(
                    f"{len(texts)} texts of up to {longest} tokens take more memory than there is; send "
                    f"shorter ones, or serve with a smaller --max-context"
                ) from error
            raise ProviderError(f"the runtime failed on {len(texts)} texts: {said}") from error
        return found


def open_embedder(
    artifact: Artifact, config: SessionConfig, report: Callable[[LoadReport], None]
) -> EmbeddingSession:
    """Load an artifact's graph.

    Raises ProviderError if the runtime is missing or will not run the graph, ArtifactError if the graph is
    damaged or none of a text's vector, ResourceError or UsageError if a text of the context does not fit.
    """
    manifest = artifact.manifest
    _check_graph(artifact)
    _check_settings(config, artifact)
    runtime = import_runtime(manifest.min_onnxruntime)
    provider = activate(config.provider, runtime)
    require_unrecorded(provider, f"{artifact.folder}, which embeds texts")
    check_target(manifest.target, provider.runtime_name)
    require_arithmetic(provider.runtime_name, (manifest.recipe.compute_type,))
    threads = config.threads or usable_cpus()
    context, limited = _context(manifest, config, provider.runtime_name)
    short = f"context limited to {context} of {manifest.context_length} tokens: memory is short"
    notices = filter(None, (short if limited else None, widening_notice(manifest)))
    capacity = KvCapacity(slots=1, context=context, bytes_per_token=0, budget=context)
    report(LoadReport(threads, capacity, "; ".join(notices) or None))
    session = load_graph(artifact.graph_path, manifest.recipe, runtime, threads, provider, plain=False)
    if manifest.widened_bytes:
        give_back_freed()
    check_signature(artifact, artifact.graph_path, session, manifest.kv.dtype)
    where = placement(
        session,
        provider.runtime_name,
        graph=artifact.graph_path,
        allow_cpu_nodes=config.provider.allow_cpu_nodes,
    )
    return EmbeddingSession(session, replace(where, device=provider.device), context=context)


def _check_graph(artifact: Artifact) -> None:
    manifest = artifact.manifest
    inputs, outputs = ({spec.name for spec in specs} for specs in (manifest.inputs, manifest.outputs))
    if inputs != _INPUTS or outputs != {_OUTPUT}:
        raise ArtifactError(
            f"{artifact.graph_path} takes {', '.join(sorted(inputs))[:200]} and gives "
            f"{', '.join(sorted(outputs))[:200]}; expected {', '.join(sorted(_INPUTS))} and {_OUTPUT}. "
            f"Export the model again, or upgrade llorch"
        )


def _check_settings(config: SessionConfig, artifact: Artifact) -> None:
    """Raise UsageError for a setting of a cache or of several graphs, neither of which there is."""
    for flag, given in (
        ("--kv-cache-memory", config.kv_cache_bytes is not None),
        (f"--kv-dtype {config.kv_dtype}", config.kv_dtype is not None),
        ("--single-graph", config.single_graph),
        ("--batch-invariant", config.batch_invariant),
    ):
        if given:
            raise UsageError(
                f"{flag} has no effect on {artifact.folder}, whose graph embeds texts and has no KV cache; "
                f"leave it out"
            )


def _context(manifest: Manifest, config: SessionConfig, provider: str) -> tuple[int, bool]:
    """Return the most tokens of a text, and whether memory limits them to less than the artifact's."""
    asked = config.max_context
    if asked is not None and not 2 <= asked <= manifest.context_length:
        raise UsageError(
            f"--max-context is {asked}; this artifact takes 2 to {manifest.context_length} tokens"
        )
    free = MEMORY_SHARE * psutil.virtual_memory().available - loaded_bytes(manifest, provider)
    fits = max(0, int(free)) // _bytes_per_token(manifest)
    if asked is None and fits >= min(BATCH_TOKENS, manifest.context_length):
        return min(manifest.context_length, fits), fits < manifest.context_length
    wanted = min(BATCH_TOKENS, manifest.context_length) if asked is None else asked
    if fits < wanted:
        raise ResourceError(
            f"texts of {wanted} tokens take {wanted * _bytes_per_token(manifest) / 2**20:.0f} MiB beside the "
            f"model, and memory has room for {fits} tokens; free some, or use a smaller --max-context"
        )
    return wanted, False


def _bytes_per_token(manifest: Manifest) -> int:
    """Return the memory that a token takes in a call, at the widest place of a layer: the residual stream,
    what enters and leaves a block, and the block's own values.
    """
    model = manifest.model
    attention = 2 * (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    return 4 * (4 * model.hidden_size + max(attention, 3 * model.active_intermediate_size))
