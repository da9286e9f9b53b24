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

from llorch_export.formats.module import EMBEDDING, HEAD
from llorch_export.graph.stage_choice import StageChoice, check_stages
from llorch_export.graph.weights import WeightJob
from llorch_serve.artifact.manifest import LlamaConfig

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_HEAD_TABLE: Final = f"{HEAD}.weight"
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
    before = behind = 0
    layers = [0] * config.num_hidden_layers
    for jobs in graphs:
        tensors = [tensor for job in jobs for tensor in job.tensors]
        # A table that both ends read goes by the embedding's name.
        ends = 1 if any(tensor.name.startswith(_HEAD_TABLE) for tensor in tensors) else 2
        for tensor in tensors:
            layer = _LAYER.match(tensor.name)
            if layer is not None:
                layers[int(layer[1])] += tensor.nbytes
            elif tensor.name.startswith(f"{EMBEDDING}."):
                before += tensor.nbytes
                behind += tensor.nbytes * (ends - 1)
            elif not tensor.name.startswith(_EVERYWHERE):
                behind += tensor.nbytes
    return Sizes(before, tuple(layers), behind)


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
