"""``llorch export``: flags to :class:`ExportOptions`, progress and result to the terminal."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from llorch_serve.artifact.manifest import (
    Activations,
    ComputeType,
    Interop,
    KvDtype,
    Precision,
    Quantizer,
    ScaleType,
    Target,
    TransformName,
)
from llorch_serve.errors import UsageError
from llorch_serve.terminal.console import byte_progress, say, write, write_json
from llorch_serve.terminal.requirements import required

if TYPE_CHECKING:
    from llorch_export.pipeline import ExportResult

Exporter = Literal["optimum"]
"""Who builds the graph, if not llorch itself."""


def command(
    source: Annotated[
        str, typer.Argument(help="GGUF file, Hugging Face folder, or hub id (org/name).", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="The artifact's folder.", show_default=False),
    ] = None,
    lora: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Merge the LoRA adapter in this PEFT folder into the weights.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        Target,
        typer.Option(
            help="The runtime that the graph is for. portable: ONNX's own operators alone. Which of them "
            "have been run is in "
            "docs/targets.md."
        ),
    ] = "cpu",
    precision: Annotated[
        Precision | None,
        typer.Option(
            help="Of the linear layers. On SmolLM2-135M, divergence from the fp32 reference in nats: fp32 "
            "below 1e-6, "
            "fp16 0.00001 and bf16 0.001 (weights, activations and KV cache in that type; the CPU has no "
            "bf16), int8 0.004, "
            "int4 0.22 (4 bits cost a small model much). source: a GGUF file's own blocks, nothing quantised "
            "anew; 0.003 from Q4_1. Default: what --recipe says; int8 for other targets; fp16 for the "
            "targets directml and coreml; fp32 with --via optimum.",
            show_default=False,
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Weights that share a scale: 16 to 256. Default: 32 for int8, 64 for int4.",
            show_default=False,
        ),
    ] = None,
    fine_block_size: Annotated[
        int | None,
        typer.Option(
            help="The same for query, key, value and down projections, whose errors weigh most. Default: "
            "--block-size; 32 for "
            "int4 where neither is given.",
            show_default=False,
        ),
    ] = None,
    quantizer: Annotated[
        Quantizer | None,
        typer.Option(
            help="How 4-bit blocks get scales. nearest: from the largest magnitude; search: least squared "
            "error of the "
            "weights (8 % less than nearest); affine: the same with zero points (30 % less); gptq: affine, "
            "and columns make up for each other's errors "
            "on a text (--calibration); hqq: zero points that keep most errors small and a few large. "
            "Default: gptq on a text that "
            "comes with llorch up to half a billion parameters, affine beyond.",
            show_default=False,
        ),
    ] = None,
    scale_type: Annotated[
        ScaleType | None,
        typer.Option(
            help="How scales are stored; a float32 one takes a whole bit a weight at block 32. Default: "
            "bfloat16 for int4, "
            "else float32.",
            show_default=False,
        ),
    ] = None,
    head_precision: Annotated[
        Precision | None,
        typer.Option(
            help="Of output head and embedding. Default: int8 for int8 and int4, else that of --precision.",
            show_default=False,
        ),
    ] = None,
    accuracy_level: Annotated[
        int | None,
        typer.Option(
            help="4: activations are rounded to int8 for each block and row (default). "
            "0: they stay fp32; slower by an order of magnitude.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A recipe: cpu or cpu-calibrated (the default without any flag that says how weights are "
            "stored; the latter up to half a billion parameters), int4, int4-mixed, int4-gptq, int8, or "
            "a TOML file with [defaults] and [[rule]] tables that say which "
            "modules are stored how (docs/recipes.md). A flag given beside it replaces its default of that "
            "name; rules stand.",
            show_default=False,
        ),
    ] = None,
    compute_type: Annotated[
        ComputeType | None,
        typer.Option(
            help="Of activations, residual stream and KV cache around int8 or int4 weights; float16 is what "
            "GPUs are fast in. "
            "Default: float32, or float16 for cuda, directml, webgpu and coreml; fp16 and bf16 set it by "
            "themselves.",
            show_default=False,
        ),
    ] = None,
    kv_dtype: Annotated[
        KvDtype | None,
        typer.Option(
            help="What the KV cache may hold while answers are generated: int8 adds a graph for that, with "
            "ranges measured on "
            "--calibration's text or one that comes with llorch. Default: int8 where weights are quantised "
            "and the target has it.",
            show_default=False,
        ),
    ] = None,
    prefill_recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Add a second graph, for prompts alone, with weights as that recipe stores them; none: "
            "leave out the one that --recipe "
            "brings.",
            show_default=False,
        ),
    ] = None,
    activations: Annotated[
        Activations | None,
        typer.Option(
            help="How what enters int8 layers is rounded. block: with the weights' blocks (default). row: by "
            "each row's "
            "largest magnitude, against whole rows of weights (0.029 nats on SmolLM2-135M, 0.012 with "
            "--transform "
            "rotate,hadamard). quarters: each quarter of a row by its own. static: what norms give by one "
            "scale, the rest by blocks; needs --transform rotate (0.006). For the target cpu alone.",
            show_default=False,
        ),
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(
            help="Longest sequence. Default: the model's own, or where its rotary scaling stops being exact.",
            show_default=False,
        ),
    ] = None,
    interop: Annotated[
        Interop | None,
        typer.Option(
            help="Another runtime that shall load the artifact too: genai (onnxruntime-genai). Adds a graph "
            "over the same "
            "weights, and settings: 1 MiB.",
            show_default=False,
        ),
    ] = None,
    via: Annotated[
        Exporter | None,
        typer.Option(
            help="Take the graph from another exporter: optimum traces the model in fp32, with an attention "
            "mask and a growing "
            "cache. A second opinion for llorch verify; slower, and without batching.",
            show_default=False,
        ),
    ] = None,
    optimum_python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="With --via optimum: the interpreter that has optimum-onnx. Default: this one.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an artifact that stands at DIR.")] = False,
    if_changed: Annotated[
        bool,
        typer.Option("--if-changed", help="Do nothing if DIR already holds this very export, byte for byte."),
    ] = False,
    transform: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Exact changes of the weights that make them easier to quantise, separated by commas. "
            "rotate: the residual "
            "stream into another basis; hadamard: the same for values; equalise: keys against queries; "
            "smooth: the down "
            "projection's input. The last two need --calibration.",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A text like those the model will see, a few pages long, to measure on what the recipe "
            "measures. Its hash "
            "goes into the manifest. Default: one that comes with llorch, where int4 or the default recipe "
            "measures unasked.",
            show_default=False,
        ),
    ] = None,
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

        llorch export ./SmolLM2-135M --output artifacts/traced --via optimum --optimum-python
        ~/optimum/bin/python

        llorch export ./Llama-3-8B --recipe mine.toml --output artifacts/llama3-mixed

        llorch export ./Llama-3-8B --dry-run

    """
    with required("export"):
        from llorch_export.optimum.export import export_via_optimum
        from llorch_export.optimum.interpreter import find_optimum
        from llorch_export.options import ExportOptions
        from llorch_export.pipeline import export
        from llorch_export.preview import preview
        from llorch_export.recipes.default import default_recipe
        from llorch_export.recipes.file import load_recipe, with_prefill
        from llorch_export.source.open import open_config
    if accuracy_level not in (None, 0, 4):
        raise UsageError(f"--accuracy-level is {accuracy_level}; expected 0 or 4")
    options = ExportOptions(
        source=source,
        output=output or Path(),
        precision=precision if via is None else precision or "fp32",
        head_precision=head_precision,
        block_size=block_size,
        fine_block_size=fine_block_size,
        quantizer=quantizer,
        scale_type=scale_type,
        accuracy_level=accuracy_level,  # type: ignore[arg-type]  # checked above
        max_context=max_context,
        force=force,
        if_changed=if_changed,
        lora=lora,
        calibration=calibration,
        transforms=_transforms(transform),
        interop=interop,
        compute_type=compute_type,
        target=target,
        kv_dtype=kv_dtype,
        activations=activations,
    )
    _check_via(via, optimum_python, target, dry_run=dry_run)
    stored = (precision, head_precision, block_size, fine_block_size, quantizer, scale_type, accuracy_level)
    shaped = (compute_type, transform, activations, interop, via)
    if target == "cpu" and all(given is None for given in (recipe, *stored, *shaped)):
        recipe = default_recipe(open_config(source))
    if recipe is not None:
        options = load_recipe(recipe).options(options)
    if prefill_recipe == "none":
        options = replace(options, prompts=None)
    elif prefill_recipe is not None:
        options = with_prefill(options, prefill_recipe)
    if dry_run:
        _print_preview(preview(options), as_json)
        return
    if output is None:
        raise UsageError("--output is missing; it names the folder that the artifact becomes")
    started = time.perf_counter()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    with byte_progress() as progress:
        if via is None:
            result = export(options, progress)
        else:
            optimum = find_optimum(optimum_python)
            say(
                f"tracing with {', '.join(f'{n} {v}' for n, v in optimum.versions.items())}: this takes "
                f"minutes"
            )
            result = export_via_optimum(options, optimum, progress)
    _report(result, recipe, time.perf_counter() - started, max_context, as_json=as_json)


def _check_via(via: Exporter | None, optimum_python: str | None, target: Target, *, dry_run: bool) -> None:
    if optimum_python is not None and via is None:
        raise UsageError("--optimum-python has no effect without --via optimum; give both")
    if via is not None and target != "cpu":
        raise UsageError(
            f"--target {target} with --via {via}: only llorch's own graph is made for a target; leave one "
            f"of them out"
        )
    if dry_run and via is not None:
        raise UsageError(
            f"--dry-run describes llorch's own graph, not one --via {via}; leave one of them out"
        )


def _report(
    result: ExportResult, recipe: str | None, seconds: float, max_context: int | None, *, as_json: bool
) -> None:
    """Say what came out, by which recipe if there was one, and what a person should know about it."""
    manifest = result.artifact.manifest
    nbytes = sum(entry.bytes for entry in manifest.files)
    if as_json:
        write_json(
            {
                "output": str(result.artifact.folder),
                "changed": result.changed,
                "bytes": nbytes,
                "seconds": round(seconds, 3),
                "fingerprint": manifest.fingerprint,
                "recipe": manifest.recipe,
                "notices": result.notices,
            }
        )
    elif result.changed:
        say(
            f"{result.artifact.folder}: {nbytes / 2**20:.1f} MiB, {recipe or manifest.recipe.precision}, in "
            f"{seconds:.1f} s"
        )
    else:
        say(f"{result.artifact.folder} is up to date")
    for notice in result.notices:
        say(f"note: {notice}")
    model = manifest.model
    if max_context is None and manifest.context_length < model.max_position_embeddings:
        say(
            f"note: the context is {manifest.context_length} of the model's {model.max_position_embeddings} "
            f"positions, because its "
            f"rotary type {model.rope.kind} rotates otherwise in longer sequences, which no fixed table "
            f"reproduces"
        )
    if not manifest.stop_token_ids:
        say("note: the checkpoint names no end-of-sequence token; answers end at max_tokens or a stop string")


def _transforms(value: str | None) -> tuple[TransformName, ...]:
    """Return the names in a list separated by commas. Raises UsageError for one that is unknown or said
    twice.
    """
    known: dict[str, TransformName] = {name: name for name in get_args(TransformName)}
    names = [] if value is None else [name.strip() for name in value.split(",")]
    for index, name in enumerate(names):
        if name not in known or name in names[:index]:
            raise UsageError(
                f"--transform {value} has {name!r} {'twice' if name in known else 'in it'}; "
                f"expected some of {', '.join(known)}, separated by commas"
            )
    return tuple(known[name] for name in names)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Unwind, so that what was written is removed. A second signal must not cut that short."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _print_preview(preview: Any, as_json: bool) -> None:
    if as_json:
        write_json(preview)
        return
    for tensor in preview["tensors"]:
        write(f"{tensor['name']:<60} {tensor['shape']}\n")
    for tensor in preview["inputs"][:6]:
        write(f"input  {tensor['name']:<53} {tensor['shape']} {tensor['dtype']}\n")
    more = preview["prompt_data_bytes"]
    prompts = "" if more is None else f"{more / 2**20:,.1f} MiB more for prompts; "
    write(
        f"{preview['parameters']:,} parameters; {preview['data_bytes'] / 2**20:,.1f} MiB of weights; "
        f"{prompts}"
        f"KV cache {preview['kv_bytes_per_token']:,} bytes a token in {preview['kv_dtype']}\n"
    )
