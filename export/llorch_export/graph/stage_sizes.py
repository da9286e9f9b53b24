"""Where a model is cut: so that the largest stage is as small as can be.

Input are planned graphs of all layers, output are ranges of layers. Bytes count by what a device must hold:
the embedding in the first stage, the head in the last, and a table that is both in either. What every stage
has, as rotary tables, does not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from llorch_export.formats.module import EMBEDDING
from llorch_export.graph.residual import FINAL_NORM
from llorch_export.graph.stage_choice import StageChoice, check_stages
from llorch_export.graph.weights import WeightJob
from llorch_serve.artifact.manifest import LlamaConfig

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_EVERYWHERE: Final = ("rotary.", "query_scale", "levels.", "lower.", "upper.", "values.")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of weights: before the layers, of each, and behind them."""

    before: int
    layers: tuple[int, ...]
    behind: int

    def of(self, layers: range) -> int:
        """Return the bytes of a stage."""
        ends = self.before * (layers.start == 0) + self.behind * (layers.stop == len(self.layers))
        return ends + sum(self.layers[layers.start : layers.stop])


def sizes(config: LlamaConfig, graphs: Iterable[Sequence[WeightJob]]) -> Sizes:
    """Add up the planned weights of graphs that have all layers, each of those that it has for itself."""
    embedding = behind = 0
    layers = [0] * config.num_hidden_layers
    for jobs in graphs:
        has_head = False
        own = 0
        for tensor in (tensor for job in jobs for tensor in job.tensors):
            layer = _LAYER.match(tensor.name)
            if layer is not None:
                layers[int(layer[1])] += tensor.nbytes
            elif tensor.name.startswith(f"{EMBEDDING}."):
                own += tensor.nbytes
            elif not tensor.name.startswith(_EVERYWHERE):
                behind += tensor.nbytes
                # A head's name depends on its form; beside it there are a norm, and a bias at most.
                has_head |= not tensor.name.startswith(f"{FINAL_NORM}.") and not tensor.name.endswith(".bias")
        embedding += own
        behind += 0 if has_head else own  # lookup and head read one table
    return Sizes(embedding, tuple(layers), behind)


def is_in(tensor: str, layers: range, config: LlamaConfig) -> bool:
    """Tell whether a checkpoint's tensor is of a stage with these layers."""
    layer = _LAYER.match(tensor)
    if layer is not None:
        return int(layer[1]) in layers
    first, last = layers.start == 0, layers.stop == config.num_hidden_layers
    if tensor.startswith(f"{EMBEDDING}."):
        return first or (last and config.tie_word_embeddings)
    return last


def cut(found: Sizes, choice: StageChoice) -> tuple[range, ...]:
    """Return the layers of each stage. Raises UsageError if the model cannot be cut as ``choice`` has it."""
    layers = len(found.layers)
    check_stages(choice, layers)
    starts = balanced(found, choice.count) if choice.cuts is None else (0, *choice.cuts)
    return tuple(map(range, starts, (*starts[1:], layers)))


def balanced(found: Sizes, count: int) -> tuple[int, ...]:
    """Return the layers that stages begin with: the largest stage is as small as can be, and so are the
    stages before it among themselves.

    Requires: at least as many layers as stages.
    """
    layers = len(found.layers)
    # Bytes before each layer, and before the end; those of the ends count for the first and last layer.
    before = [0, *(found.of(range(end)) for end in range(1, layers + 1))]
    # Of so many stages over the layers before the key: the largest stage, the sum of squares, the starts.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stages in range(1, count + 1):
        best = {
            end: min(
                (max(largest, size := before[end] - before[start]), squares + size * size, (*starts, start))
                for start, (largest, squares, starts) in best.items()
                if start < end
            )
            for end in range(stages, layers + 1)
        }
    return best[layers][2]
