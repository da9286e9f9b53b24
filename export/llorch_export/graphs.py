"""The graphs of one artifact, which read the same prepared weights and differ in inputs or recipe.

Takes what the transforms have left and the resolved export; ``pipeline.py`` writes what comes out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llorch_export.artifact.companions import prompt_plan, share_weights
from llorch_export.artifact.description import Progress
from llorch_export.artifact.staged import TABLE_FILE, StagedGraphs, StageGraphs, StageNames
from llorch_export.calibration.measurements import CalibrationIds, measured_moments
from llorch_export.graph.decoder import DecoderGraph, build_decoder, build_embedder, plan_table
from llorch_export.graph.front import Interface
from llorch_export.graph.weights import DATA_FILE, Part, WeightJob, WeightPlan
from llorch_export.quantize.error_factor import ErrorFactors, error_factor
from llorch_export.resolved import ResolvedExport
from llorch_export.transform.moments import second_moments
from llorch_export.transform.prepare import Prepared
from llorch_serve.artifact.manifest import Recipe


@dataclass(frozen=True, slots=True)
class ArtifactGraphs:
    """Builds the graphs of one artifact.

    factors: of the weights' inputs, which error feedback asks for while weights are written; None where no
        recipe does.
    """

    resolved: ResolvedExport
    prepared: Prepared
    factors: ErrorFactors | None

    def first(self, interface: Interface = Interface.LLORCH) -> DecoderGraph:
        """Build the graph that every artifact has; all interfaces read one data file."""
        if self.resolved.embedding is not None:
            return build_embedder(
                self.prepared.config,
                self.resolved.recipe,
                self.prepared.tensors,
                self.resolved.embedding,
                context_length=self.resolved.context_length,
                calibration=self.prepared.calibration,
                error_factors=self.factors,
            )
        return self._build(self.resolved.recipe, interface)

    def over_int8_cache(self) -> DecoderGraph:
        """Build the graph over a KV cache in int8, which reads the first graph's data file."""
        return self._build(self.resolved.recipe, int8_cache=True)

    def for_prompts(self, first: DecoderGraph) -> DecoderGraph | None:
        """Build the graph for prompts, whose own data file has the weights that ``first`` has not."""
        resolved = self.resolved
        if resolved.prompts is None:
            return None
        return self._build(resolved.prompts, part=Part(prompt_plan(resolved.recipe, resolved.prompts, first)))

    def staged(self) -> StagedGraphs:
        """Build the graphs of all stages, each over data files of its own."""
        resolved, prepared = self.resolved, self.prepared
        table = WeightPlan(TABLE_FILE)
        cast = plan_table(
            prepared.config,
            resolved.recipe,
            prepared.tensors,
            calibration=prepared.calibration,
            error_factors=self.factors,
            target=resolved.target,
            part=Part(table),
        )
        stages = [
            self._stage(layers, StageNames.of(number), {TABLE_FILE: table.jobs})
            for number, layers in enumerate(resolved.stages)
        ]
        return StagedGraphs(tuple(stages), tuple(table.jobs), cast)

    def whole(self, stages: StagedGraphs) -> DecoderGraph:
        """Build one graph of all layers over the data files of the stages."""
        plan = WeightPlan(DATA_FILE, stages.jobs)
        graph = self._build(self.resolved.recipe, part=Part(plan))
        assert not plan.jobs, "the stages have all weights"
        return graph

    def _stage(
        self, layers: range, names: StageNames, table: Mapping[str, Sequence[WeightJob]]
    ) -> StageGraphs:
        resolved = self.resolved

        def built(*, int8_cache: bool = False) -> DecoderGraph:
            part = Part(WeightPlan(names.data, table), layers, names.scales)
            return self._build(resolved.recipe, int8_cache=int8_cache, part=part)

        first = built()
        decode = built(int8_cache=True) if resolved.recipe.int8_cache else None
        assert decode is None or [job.tensors for job in decode.jobs] == [job.tensors for job in first.jobs]
        prompts = None
        if resolved.prompts is not None:
            shared = share_weights(resolved.recipe, resolved.prompts)
            others = {**table, names.data: first.jobs} if shared else None
            part = Part(WeightPlan(names.prompts_data, others), layers)
            prompts = self._build(resolved.prompts, part=part)
        return StageGraphs(layers, names, first, decode, prompts)

    def _build(
        self,
        recipe: Recipe,
        interface: Interface = Interface.LLORCH,
        *,
        int8_cache: bool = False,
        part: Part | None = None,
    ) -> DecoderGraph:
        return build_decoder(
            self.prepared.config,
            recipe,
            self.prepared.tensors,
            context_length=self.resolved.context_length,
            calibration=self.prepared.calibration,
            error_factors=self.factors,
            interface=interface,
            target=self.resolved.target,
            int8_cache=int8_cache,
            part=part,
        )


@contextlib.contextmanager
def error_factors(
    prepared: Prepared, recipe: Recipe, text: CalibrationIds | None, progress: Progress
) -> Iterator[ErrorFactors | None]:
    """Give what measures how inputs move together while weights are written; None where the recipe asks for
    none.

    Requires: a text, where the recipe measures.
    """
    if not measured_moments(recipe):
        yield None
        return
    assert text is not None, "options that measure come with a text"
    with second_moments(prepared.config, prepared.tensors, text.ids, progress, error_factor) as moments:
        yield moments.of
