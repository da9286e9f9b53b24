"""Flags of ``llorch export``, and the options that they make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from llorch_export.graph.stage_choice import parse_stages
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
from llorch_serve.hub.reference import Hub, with_hub, with_revision
from llorch_serve.terminal.groups import FlagGroup

if TYPE_CHECKING:
    from llorch_export.options import ExportOptions

Exporter = Literal["optimum"]
"""Who builds the graph, if not llorch itself."""

Embed = Literal["last", "mean", "none"]
"""How texts become vectors."""


SourceArgument = Annotated[
    str,
    typer.Argument(
        help="GGUF file, Hugging Face folder, or hub id: org/name, org/name@REV, org/name:Q4_K_M.",
        show_default=False,
    ),
]
"""The checkpoint to read."""


class RevisionFlags(FlagGroup, frozen=True):
    """Which hub's repository is meant, and which state of it."""

    revision: Annotated[
        str | None,
        typer.Option(
            metavar="REV",
            help="With a hub id: a branch, a tag or a commit of it, as in org/name@REV. Default: its main "
            "branch.",
            show_default=False,
        ),
    ] = None
    hub: Annotated[
        Hub | None,
        typer.Option(
            help="With a hub id: where it is, as in modelscope://org/name. Default: huggingface.",
            show_default=False,
        ),
    ] = None

    def of(self, source: str) -> str:
        """Return the source at the revision and the hub that are meant. Raises UsageError."""
        return with_hub(with_revision(source, self.revision), self.hub)


class ArtifactFlags(FlagGroup, frozen=True):
    """Where the artifact goes, what is merged into it and what runs it."""

    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="The artifact's folder.", show_default=False),
    ] = None
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR[=WEIGHT]",
            help="Merge the LoRA adapter in this PEFT folder into the weights, times WEIGHT if there is one; "
            "may be repeated.",
            show_default=False,
        ),
    ] = None
    target: Annotated[
        Target,
        typer.Option(
            help="The runtime that the graph is for. portable: ONNX's own operators alone. Which of them "
            "have been run is in "
            "docs/targets.md."
        ),
    ] = "cpu"
    embed: Annotated[
        Embed | None,
        typer.Option(
            help="Give a vector for each text in place of logits: the hidden state of its last token, or the "
            "mean over all of them, behind the final norm, divided by its length. none: a language model. "
            "Default: what files of sentence-transformers beside it say, or a GGUF file's pooling_type.",
            show_default=False,
        ),
    ] = None


class WeightFlags(FlagGroup, frozen=True):
    """How weights are stored."""

    precision: Annotated[
        Precision | None,
        typer.Option(
            help="Of the linear layers. On SmolLM2-135M, divergence from the fp32 reference in nats: fp32 "
            "below 1e-6, "
            "fp16 0.00001 and bf16 0.001 (weights, activations and KV cache in that type; the CPU has no "
            "bf16), int8 0.004, "
            "int4 0.22 (4 bits cost a small model much). source: a GGUF file's own blocks, or the codes of "
            "packed weights, nothing quantised anew; 0.003 from Q4_1. Default: what --recipe says; int8 for "
            "other targets; fp16 for the targets directml and coreml; fp32 with --via optimum.",
            show_default=False,
        ),
    ] = None
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Weights that share a scale: 16 to 256. Default: 32 for int8, 64 for int4.",
            show_default=False,
        ),
    ] = None
    fine_block_size: Annotated[
        int | None,
        typer.Option(
            help="The same for query, key, value and down projections, whose errors weigh most. Default: "
            "--block-size; 32 for "
            "int4 where neither is given.",
            show_default=False,
        ),
    ] = None
    quantizer: Annotated[
        Quantizer | None,
        typer.Option(
            help="How 4-bit blocks get scales. nearest: from the largest magnitude; search: least squared "
            "error of the "
            "weights (8 % less than nearest); affine: the same with zero points (30 % less); gptq: affine, "
            "and columns make up for each other's errors "
            "on a text (--calibration); hqq: zero points that keep most errors small and a few large. "
            "Default: gptq on a text that "
            "comes with llorch up to half a billion parameters, affine beyond. 8-bit blocks are "
            "nearest, or gptq where that is said.",
            show_default=False,
        ),
    ] = None
    scale_type: Annotated[
        ScaleType | None,
        typer.Option(
            help="How scales are stored; a float32 one takes a whole bit a weight at block 32. Default: "
            "bfloat16 for int4, "
            "else float32.",
            show_default=False,
        ),
    ] = None
    head_precision: Annotated[
        Precision | None,
        typer.Option(
            help="Of output head and embedding. Default: int8 for int8 and int4, else that of --precision.",
            show_default=False,
        ),
    ] = None
    accuracy_level: Annotated[
        int | None,
        typer.Option(
            help="4: activations are rounded to int8 for each block and row (default). "
            "0: they stay fp32 (default for packed codes of 2 bits); slower by an order of magnitude with "
            "codes of 8 bits.",
            show_default=False,
        ),
    ] = None

    def add_to(self, options: ExportOptions) -> ExportOptions:
        """Return the options with these flags. Raises UsageError for a level that there is not."""
        if self.accuracy_level not in (None, 0, 4):
            raise UsageError(f"--accuracy-level is {self.accuracy_level}; expected 0 or 4")
        return replace(
            options,
            precision=self.precision,
            head_precision=self.head_precision,
            block_size=self.block_size,
            fine_block_size=self.fine_block_size,
            quantizer=self.quantizer,
            scale_type=self.scale_type,
            accuracy_level=self.accuracy_level,  # type: ignore[arg-type]  # checked above
        )


class GraphFlags(FlagGroup, frozen=True):
    """What the graph computes in, caches and takes."""

    compute_type: Annotated[
        ComputeType | None,
        typer.Option(
            help="Of activations, residual stream and KV cache around int8 or int4 weights; float16 is what "
            "GPUs are fast in. "
            "Default: float32, or float16 for cuda, directml, webgpu and coreml; fp16 and bf16 set it by "
            "themselves.",
            show_default=False,
        ),
    ] = None
    kv_dtype: Annotated[
        KvDtype | None,
        typer.Option(
            help="What the KV cache may hold while answers are generated: int8 adds a graph for that, with "
            "ranges measured on --calibration's text or one that comes with llorch. Default: int8 where "
            "weights are quantised and the target has it, but not beside packed weights that --precision "
            "source keeps.",
            show_default=False,
        ),
    ] = None
    prefill_recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Add a second graph, for prompts alone, with weights as that recipe stores them; none: "
            "leave out the one that --recipe "
            "brings.",
            show_default=False,
        ),
    ] = None
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
    ] = None
    max_context: Annotated[
        int | None,
        typer.Option(
            help="Longest sequence. Default: the model's own, or where its rotary scaling stops being exact.",
            show_default=False,
        ),
    ] = None
    stages: Annotated[
        str | None,
        typer.Option(
            metavar="N[,at=L1,..]",
            help="Cut the model into N graphs that run one after another, on several devices or nodes: by "
            "the bytes of their weights, or before the layers that at= names (docs/stages.md).",
            show_default=False,
        ),
    ] = None
    interop: Annotated[
        Interop | None,
        typer.Option(
            help="Another runtime that shall load the artifact too: genai (onnxruntime-genai). Adds a graph "
            "over the same "
            "weights, and settings: 1 MiB.",
            show_default=False,
        ),
    ] = None

    def add_to(self, options: ExportOptions) -> ExportOptions:
        """Return the options with these flags; a recipe for prompts is added after the recipe itself."""
        return replace(
            options,
            compute_type=self.compute_type,
            kv_dtype=self.kv_dtype,
            activations=self.activations,
            max_context=self.max_context,
            interop=self.interop,
            stages=parse_stages(self.stages),
        )


class ExporterFlags(FlagGroup, frozen=True):
    """Who builds the graph."""

    via: Annotated[
        Exporter | None,
        typer.Option(
            help="Take the graph from another exporter: optimum traces the model in fp32, with an attention "
            "mask and a growing "
            "cache. A second opinion for llorch verify; slower, and without batching.",
            show_default=False,
        ),
    ] = None
    optimum_python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="With --via optimum: the interpreter that has optimum-onnx. Default: this one.",
            show_default=False,
        ),
    ] = None

    def add_to(self, options: ExportOptions) -> ExportOptions:
        """Return the options as the exporter takes them: Optimum traces in fp32 unless told otherwise."""
        return options if self.via is None else replace(options, precision=options.precision or "fp32")

    def check(self, target: Target, embed: Embed | None, stages: str | None, *, dry_run: bool) -> None:
        """Raise UsageError for what another exporter cannot do."""
        if self.via is not None and stages is not None:
            raise UsageError(
                f"--stages {stages} with --via {self.via}: only llorch's own graph is cut into stages; leave "
                f"one of them out"
            )
        if self.via is not None and embed not in (None, "none"):
            raise UsageError(
                f"--embed {embed} with --via {self.via}: only llorch's own graph embeds texts; leave one of "
                "them out"
            )
        if self.optimum_python is not None and self.via is None:
            raise UsageError("--optimum-python has no effect without --via optimum; give both")
        if self.via is not None and target != "cpu":
            raise UsageError(
                f"--target {target} with --via {self.via}: only llorch's own graph is made for a target; "
                f"leave one of them out"
            )
        if dry_run and self.via is not None:
            raise UsageError(
                f"--dry-run describes llorch's own graph, not one --via {self.via}; leave one of them out"
            )


class ReplaceFlags(FlagGroup, frozen=True):
    """What becomes of an artifact that stands there."""

    force: Annotated[bool, typer.Option("--force", help="Replace an artifact that stands at DIR.")] = False
    if_changed: Annotated[
        bool,
        typer.Option("--if-changed", help="Do nothing if DIR already holds this very export, byte for byte."),
    ] = False


class TransformFlags(FlagGroup, frozen=True):
    """What is done to the weights before they are quantised."""

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
    ] = None
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
    ] = None

    def add_to(self, options: ExportOptions) -> ExportOptions:
        """Return the options with these flags. Raises UsageError for a transform that there is not."""
        return replace(options, transforms=self.transforms(), calibration=self.calibration)

    def transforms(self) -> tuple[TransformName, ...]:
        """Return the transforms by name. Raises UsageError for one that is unknown or said twice."""
        known: dict[str, TransformName] = {name: name for name in get_args(TransformName)}
        names = [] if self.transform is None else [name.strip() for name in self.transform.split(",")]
        for index, name in enumerate(names):
            if name not in known or name in names[:index]:
                raise UsageError(
                    f"--transform {self.transform} has {name!r} {'twice' if name in known else 'in it'}; "
                    f"expected some of {', '.join(known)}, separated by commas"
                )
        return tuple(known[name] for name in names)
