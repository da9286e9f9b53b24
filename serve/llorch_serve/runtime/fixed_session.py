"""A session on two graphs of fixed shapes, for one token and for a part of a prompt, as Core ML wants them.

Each takes one sequence, and its past has every position of the context from the start: a bias hides those
that hold nothing yet. What a call computes comes out beside the past and is written into it here. A call
costs by the context, not by the length of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psutil

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import cache_names
from llorch_serve.cache.kv_cache import KvCache, KvCapacity, plan_capacity
from llorch_serve.config import SessionConfig
from llorch_serve.engine.capabilities import Capabilities
from llorch_serve.errors import ArtifactError, ProviderError, UsageError
from llorch_serve.providers import (
    Memory,
    Placement,
    activate,
    check_target,
    import_runtime,
    placement,
    require_arithmetic,
    usable_cpus,
)
from llorch_serve.runtime.graph_loading import check_signature, load_graph
from llorch_serve.runtime.memory_plan import loaded_bytes
from llorch_serve.runtime.opening import LoadReport

Logits = npt.NDArray[np.float32]

_HIDDEN: Final = -10_000.0
"""What is added to a score that must not count: its exponential is 0, and float16 holds it."""

_FILLED: Final = frozenset({"input_ids", "position_ids", "logits_indices", "attention_bias", "window_bias"})


class FixedSession:
    """Runs parts of prompts and single tokens, slot by slot. Not thread-safe.

    graphs: onnxruntime's sessions, by the tokens that a call takes.
    """

    def __init__(
        self, artifact: Artifact, where: Placement, capacity: KvCapacity, graphs: dict[int, Any]
    ) -> None:
        manifest = artifact.manifest
        self.artifact = artifact
        self.placement = where
        self.capacity = capacity
        # How a prompt is cut decides which columns a token's keys stand in, and so the last bits of its sums.
        self.capabilities = Capabilities(
            batched_decode=False, batch_invariant=False, drafts=False, separate_prompts=True
        )
        # The graph reads the whole context, whatever of it sequences may use; what was never written takes no
        # memory.
        self._context = manifest.context_length
        self._cache = KvCache(manifest.kv, replace(capacity, context=self._context))
        self._graphs = graphs
        self._part = max(graphs)
        self._biases = [
            (spec.name, np.dtype(spec.dtype), window)
            for spec in manifest.inputs
            for name, window in (("attention_bias", None), ("window_bias", manifest.model.sliding_window))
            if spec.name == name
        ]
        kv = manifest.kv
        self._places = [(layer, kind) for layer in range(kv.layers) for kind in ("key", "value")]
        self._past = [kv.past_name.format(layer=layer, kind=kind) for layer, kind in self._places]
        self._outputs = [
            "logits",
            *(kv.present_name.format(layer=la, kind=kind) for la, kind in self._places),
        ]

    def prefill(
        self, slot: int, token_ids: Sequence[int], start: int, wanted: Sequence[int] | None = None
    ) -> Logits:
        """See :meth:`llorch_serve.runtime.session.DecoderSession.prefill`.

        A graph gives one row of logits a call, so each further one that is wanted takes another call.
        """
        rows = [len(token_ids) - 1] if wanted is None else wanted
        found: dict[int, Logits] = {}
        for first in range(0, len(token_ids), self._part):
            part = token_ids[first : first + self._part]
            tokens = self._part if len(token_ids) > 1 else 1
            here = [row - first for row in rows if first <= row < first + len(part)]
            for row in here or [len(part) - 1]:
                found[first + row] = self._run(slot, part, start + first, tokens, row)
        return self._stack([found[row] for row in rows])

    def decode(self, token_ids: Sequence[int], lengths: Sequence[int]) -> Logits:
        """See :meth:`llorch_serve.runtime.session.DecoderSession.decode`; each slot takes a call of its
        own.
        """
        rows = enumerate(zip(token_ids, lengths, strict=True))
        return self._stack([self._run(slot, (token,), length - 1, 1, 0) for slot, (token, length) in rows])

    def verify(self, slot: int, token_ids: Sequence[int], start: int) -> Logits:
        """See :meth:`llorch_serve.runtime.session.DecoderSession.verify`; each token takes a call of its
        own.
        """
        rows = enumerate(token_ids, start)
        return self._stack([self._run(slot, (token,), position, 1, 0) for position, token in rows])

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        """Copy the keys and values of the first ``tokens`` positions to another slot."""
        self._cache.copy(source, target, tokens)

    def swap_slots(self, first: int, second: int, tokens: int) -> None:
        """Exchange the keys and values of the first ``tokens`` positions of two slots."""
        self._cache.swap(first, second, tokens)

    def release_slot(self, slot: int, keep: int) -> None:
        """Give the memory behind a slot's positions from ``keep`` on back to the system."""
        self._cache.release(slot, keep)

    def _run(self, slot: int, token_ids: Sequence[int], start: int, tokens: int, wanted: int) -> Logits:
        """Run ``token_ids``, padded to ``tokens``, and keep their keys and values; return logits
        [vocabulary].

        Raises ProviderError if the runtime fails.
        """
        count = len(token_ids)
        ids, positions = np.zeros((2, 1, tokens), np.int64)
        ids[0, :count] = token_ids
        positions[0, :count] = np.arange(start, start + count)
        feed: dict[str, npt.NDArray[np.generic]] = {
            "input_ids": ids,
            "position_ids": positions,
            "logits_indices": np.array([wanted]),
        }
        for name, kind, window in self._biases:
            feed[name] = _bias(start, tokens, self._context, window).astype(kind)[None, None]
        past = [self._cache.rows(*place, slot, 1) for place in self._places]
        feed.update(zip(self._past, past, strict=True))
        try:
            logits, *new = self._graphs[tokens].run(self._outputs, feed)
        except Exception as error:  # the runtime's own classes of errors share no narrower base
            raise ProviderError(
                f"the runtime failed in a step: {str(error).strip().splitlines()[0]}"
            ) from error
        for held, computed in zip(past, new, strict=True):
            held[:, :, start : start + count] = computed[:, :, :count]
        row: Logits = logits[0]
        return row

    def _stack(self, rows: list[Logits]) -> Logits:
        return np.stack(rows) if rows else np.empty((0, self.artifact.manifest.model.vocab_size), np.float32)


def _bias(start: int, tokens: int, context: int, window: int | None) -> npt.NDArray[np.float32]:
    """Return [tokens, context + tokens]: zero where a token sees a position of the past, or one of its own
    call.
    """
    columns = np.concatenate([np.arange(context), start + np.arange(tokens)])
    written = np.concatenate([np.arange(context) < start, np.ones(tokens, bool)])
    rows = (start + np.arange(tokens))[:, None]
    sees = written & (columns <= rows)
    if window is not None:
        sees &= columns > rows - window
    return np.where(sees, np.float32(0), np.float32(_HIDDEN))


def open_fixed(
    artifact: Artifact, config: SessionConfig, report: Callable[[LoadReport], None]
) -> FixedSession:
    """Load both graphs of an artifact of fixed shapes and make its cache.

    Raises as :func:`llorch_serve.runtime.opening.open_session`.
    """
    manifest = artifact.manifest
    fixed = manifest.fixed_shapes
    assert fixed is not None
    for flag, value in (
        ("--kv-dtype", config.kv_dtype),
        ("--single-graph", config.single_graph or None),
        ("--batch-invariant", config.batch_invariant or None),
    ):
        if value is not None:
            raise UsageError(
                f"{flag} has no effect on {artifact.folder}, whose graphs have fixed shapes; leave it out"
            )
    runtime = import_runtime(manifest.min_onnxruntime)
    provider = activate(config.provider, runtime)
    check_target(manifest.target, provider.runtime_name)
    require_arithmetic(provider.runtime_name, (manifest.recipe.compute_type,))
    assert provider.memory is Memory.HOST  # as of every provider that such graphs are for
    if odd := sorted({spec.name for spec in manifest.inputs} - _FILLED - cache_names(manifest.kv)):
        raise ArtifactError(
            f"{artifact.graph_path} has the inputs {', '.join(odd[:5])}, which this llorch does not fill; "
            f"export the model again"
        )
    free = provider.memory_limit(psutil.virtual_memory().available)
    capacity = plan_capacity(
        manifest.kv,
        slots=config.slots,
        context_length=manifest.context_length,
        max_context=config.max_context,
        free_bytes=max(free - loaded_bytes(manifest, provider.runtime_name, weights=2), 0),
        cache_bytes=config.kv_cache_bytes,
    )
    threads = config.threads or usable_cpus()
    report(LoadReport(threads, capacity, capacity.notice(manifest.context_length)))
    graphs, places = {}, []
    for tokens, path in ((fixed.prefill_tokens, artifact.prompt_graph_path), (1, artifact.graph_path)):
        graphs[tokens] = load_graph(path, manifest.recipe, runtime, threads, provider, plain=False)
        if tokens == 1:
            check_signature(artifact, path, graphs[tokens], manifest.kv.dtype)
        places.append(
            placement(
                graphs[tokens],
                provider.runtime_name,
                graph=path,
                allow_cpu_nodes=config.provider.allow_cpu_nodes,
            )
        )
    where = replace(min(places, key=lambda where: where.node_share), device=provider.device)
    return FixedSession(artifact, where, capacity, graphs)
