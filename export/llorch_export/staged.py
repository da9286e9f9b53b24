"""A model in stages: where it is cut, and how its graphs and weights are written.

Takes the resolved export and its prepared weights; ``pipeline.py`` adds what belongs to no stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from llorch_export.artifact.companions import int8_form, measured_scales, planned
from llorch_export.artifact.description import Progress, listed
from llorch_export.artifact.staged import StagedGraphs, add_scales, as_one_graph, write_stages
from llorch_export.artifact.write import ArtifactWriter
from llorch_export.calibration.measurements import CalibrationIds
from llorch_export.checkpoint.base import LazyTensor
from llorch_export.formats.targets import TARGETS
from llorch_export.graph.decoder import DecoderGraph
from llorch_export.graph.source_forms import SourceForms, widened_bytes
from llorch_export.graph.stage_sizes import cut, is_in, sizes
from llorch_export.graphs import ArtifactGraphs
from llorch_export.resolved import ResolvedExport
from llorch_export.transform.prepare import fixed_transforms
from llorch_serve.artifact.manifest import LlamaConfig, Manifest, PromptGraph, Stage


def cut_into_stages(
    resolved: ResolvedExport, config: LlamaConfig, tensors: Mapping[str, LazyTensor]
) -> ResolvedExport:
    """Return the export with the layers of each stage, as its options have it; unchanged where they ask for
    one graph. Reads no weights.

    Raises UsageError if the model cannot be cut so.
    """
    if resolved.options.stages is None:
        return resolved
    config, tensors = fixed_transforms(config, tensors, resolved.recipe)
    graphs = (graph for graph in planned(resolved, config, tensors) if graph is not None)
    found = sizes(config, [graph.jobs for graph in graphs])
    return replace(resolved, stages=cut(found, resolved.options.stages))


@dataclass(frozen=True, slots=True)
class StagedWriting:
    """Writes the graphs of an artifact in stages."""

    writer: ArtifactWriter
    graphs: ArtifactGraphs
    staged: StagedGraphs

    @property
    def data_bytes(self) -> int:
        """Bytes of all data files."""
        return self.staged.data_bytes

    def write(self, progress: Progress) -> tuple[DecoderGraph, tuple[Stage, ...]]:
        """Write graphs and weights; return one graph of all layers over their files, with what is to be known
        of them, and what the manifest says of each.
        """
        whole = self.graphs.whole(self.staged)
        stages = write_stages(self.writer, self.staged, self.graphs.resolved.target, progress)
        return self.staged.described(whole), tuple(map(self._widened, stages))

    def completed(
        self, manifest: Manifest, whole: DecoderGraph, text: CalibrationIds | None, progress: Progress
    ) -> Manifest:
        """Measure and write the scales of a KV cache in int8, if there is one; return the manifest with what
        it says of that, and of graphs for prompts.
        """
        first, prompts = self.staged.stages[0].names, self.graphs.resolved.prompts
        int8_cache = None
        if self.graphs.resolved.recipe.int8_cache:
            with as_one_graph(self.writer, manifest, whole) as artifact:
                add_scales(self.writer, self.staged, measured_scales(artifact, text, progress))
            int8_cache = int8_form(first.decode_graph, first.scales, text)
        return msgspec.structs.replace(
            manifest,
            files=listed(self.writer),
            int8_cache=int8_cache,
            prompts=None
            if prompts is None
            else PromptGraph(graph=first.prompts_graph, data=first.prompts_data, recipe=prompts),
        )

    def _widened(self, stage: Stage) -> Stage:
        """Return a stage with what the runtime makes of its packed weights, where it widens some."""
        resolved, prepared = self.graphs.resolved, self.graphs.prepared
        if resolved.recipe.precision != "source":
            return stage
        layers = range(stage.first_layer, stage.end_layer)
        own = {name: t for name, t in prepared.tensors.items() if is_in(name, layers, prepared.config)}
        forms = SourceForms(prepared.tensors, TARGETS[resolved.target], resolved.recipe)
        return msgspec.structs.replace(stage, widened_bytes=widened_bytes(own, forms) or msgspec.UNSET)
