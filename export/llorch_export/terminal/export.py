"""``llorch export``: flags to :class:`ExportOptions`, progress and result to the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_export.terminal.export_flags import (
    ArtifactFlags,
    ExporterFlags,
    GraphFlags,
    ReplaceFlags,
    RevisionFlags,
    SourceArgument,
    TransformFlags,
    WeightFlags,
)
from llorch_export.terminal.interrupts import unwind_on_signals
from llorch_serve.errors import UsageError
from llorch_serve.terminal.console import byte_progress, say
from llorch_serve.terminal.groups import composed
from llorch_serve.terminal.requirements import required

if TYPE_CHECKING:
    from llorch_export.options import ExportOptions
    from llorch_export.pipeline import ExportResult


@composed
def command(
    source: SourceArgument,
    hub: RevisionFlags,
    artifact: ArtifactFlags,
    *,
    weights: WeightFlags,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A recipe: cpu or cpu-calibrated (the default without any flag that says how weights are "
            "stored; the latter up to half a billion parameters; with --embed fp32, and int8 beyond a "
            "billion), int4, int4-mixed, int4-gptq, int8, fp32, or a TOML file with [defaults] and [[rule]] "
            "tables that say which modules are stored how (docs/recipes.md). A flag given beside it replaces "
            "its default of that name; rules stand.",
            show_default=False,
        ),
    ] = None,
    graph: GraphFlags,
    exporter: ExporterFlags,
    replacing: ReplaceFlags,
    transform: TransformFlags,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print shapes and sizes; reads no weights, writes nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Export a Llama-family checkpoint to an ONNX artifact.

    For example:

        llorch export SmolLM2-135M-Instruct.gguf --output artifacts/smollm2

        llorch export HuggingFaceTB/SmolLM2-135M-Instruct --output artifacts/smollm2-fp32 --precision fp32

        llorch export Llama-3-8B.Q4_K_M.gguf --output artifacts/llama3 --precision source

        llorch export SmolLM2-135M-Instruct.gguf --output artifacts/smollm2-genai --interop genai

        llorch export ./SmolLM2-135M --output artifacts/traced --via optimum --optimum-python ~/optimum/bin/python

        llorch export ./Llama-3-8B --recipe mine.toml --output artifacts/llama3-mixed

        llorch export ./Llama-3-8B --output artifacts/llama3-two --stages 2

        llorch export ./Llama-3-8B --dry-run

    """  # noqa: E501 - an example is one line
    with required("export"):
        from llorch_export.adapter.choice import parse_choices
        from llorch_export.options import ExportOptions
        from llorch_export.preview import preview
        from llorch_export.recipes.default import unasked_recipe
        from llorch_export.recipes.file import with_recipes
    from llorch_export.terminal.export_output import show_preview, show_result

    source = hub.of(source)
    options = ExportOptions(
        source=source,
        output=artifact.output or Path(),
        lora=parse_choices(artifact.lora or ()),
        target=artifact.target,
        embed=artifact.embed,
        force=replacing.force,
        if_changed=replacing.if_changed,
    )
    options = transform.add_to(graph.add_to(weights.add_to(options)))
    exporter.check(artifact.target, artifact.embed, graph.stages, dry_run=dry_run)
    if recipe is None and exporter.via is None:
        recipe = unasked_recipe(options)
    options = with_recipes(exporter.add_to(options), recipe, graph.prefill_recipe)
    if dry_run:
        show_preview(preview(options), as_json=as_json)
        return
    if artifact.output is None:
        raise UsageError("--output is missing; it names the folder that the artifact becomes")
    started = time.perf_counter()
    result = _export(options, exporter)
    seconds = time.perf_counter() - started
    show_result(result, recipe, seconds, graph.max_context, as_json=as_json)


def _export(options: ExportOptions, exporter: ExporterFlags) -> ExportResult:
    """Run the exporter that was asked for, with its progress on the terminal, until it ends or a signal
    comes.
    """
    from llorch_export.optimum.export import export_via_optimum
    from llorch_export.optimum.interpreter import find_optimum
    from llorch_export.pipeline import export

    unwind_on_signals()
    with byte_progress() as progress:
        if exporter.via is None:
            return export(options, progress)
        optimum = find_optimum(exporter.optimum_python)
        versions = ", ".join(f"{name} {version}" for name, version in optimum.versions.items())
        say(f"tracing with {versions}: this takes minutes")
        return export_via_optimum(options, optimum, progress)
