"""A graph that is loaded when it is first run.

Whoever waits for an answer waits for the graph that takes the prompt; only the second token needs the one
that decodes, and an answer of one token never does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llorch_serve.errors import ArtifactError, ProviderError
from llorch_serve.runtime.bound_graph import Logits
from llorch_serve.runtime.session import Graph


class LateGraph:
    """Runs a graph, which its first call loads. Not thread-safe, as no graph is.

    load: returns onnxruntime's session. bind: binds that to a cache.
    """

    def __init__(self, load: Callable[[], Any], bind: Callable[[Any], Graph]) -> None:
        self._load = load
        self._bind = bind
        self._graph: Graph | None = None

    def run(
        self, first: int, token_ids: Sequence[int], lengths: Sequence[int], wanted: Sequence[int]
    ) -> Logits:
        """Run as the graph does. Raises ProviderError also if it cannot be loaded."""
        if self._graph is None:
            try:
                self._graph = self._bind(self._load())
            except ArtifactError as error:  # of the artifact, but told by a call that has failed
                raise ProviderError(str(error)) from error
        return self._graph.run(first, token_ids, lengths, wanted)
