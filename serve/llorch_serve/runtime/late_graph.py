"""A graph that is still being loaded while another one already takes the prompt.

Loading a graph takes a core for longer than the prompt of somebody who waits does, and only the second token
needs the graph that decodes. It is loaded on a thread of its own; the first call of it waits for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from llorch_serve.errors import ArtifactError, ProviderError
from llorch_serve.runtime.bound_graph import Logits
from llorch_serve.runtime.session import Graph


def loaded_late(load: Callable[[], Any]) -> Future[Any]:
    """Begin to load a graph on a thread of its own; return what will have onnxruntime's session."""
    threads = ThreadPoolExecutor(1, "late-graph")
    loading = threads.submit(load)
    threads.shutdown(wait=False)
    return loading


class LateGraph:
    """Runs a graph once it has been loaded. Not thread-safe, as no graph is.

    loading: has onnxruntime's session in the end. bind: binds that to a cache.
    """

    def __init__(self, loading: Future[Any], bind: Callable[[Any], Graph]) -> None:
        self._loading = loading
        self._bind = bind
        self._graph: Graph | None = None

    def run(
        self, first: int, token_ids: Sequence[int], lengths: Sequence[int], wanted: Sequence[int]
    ) -> Logits:
        """Run as the graph does, which is waited for. Raises ProviderError also if it could not be loaded."""
        if self._graph is None:
            try:
                self._graph = self._bind(self._loading.result())
            except ArtifactError as error:  # of the artifact, but told by a call that has failed
                raise ProviderError(str(error)) from error
        return self._graph.run(first, token_ids, lengths, wanted)
