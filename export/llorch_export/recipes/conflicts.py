"""Options that do not go together: one table, checked from its first row to its last.

Takes options with their defaults filled in (``settled.py``). What also depends on the model is checked where
rules are resolved (``rules.py``).
"""

from __future__ import annotations

from typing import Final

from llorch_export.formats.precisions import UNQUANTISED
from llorch_export.formats.targets import TARGETS, BlockForm
from llorch_export.recipes.conflict_rows import Conflict, beyond_target, no_effect, wrong_block_size
from llorch_export.recipes.settled import SettledOptions, Storage
from llorch_serve.errors import UsageError


def first_conflict(settled: SettledOptions) -> Conflict | None:
    """Return the first row that the options run into, if there is one."""
    return next((row for row in CONFLICTS if row.found(settled)), None)


def refuse_conflicts(settled: SettledOptions) -> None:
    """Raise UsageError if some options do not go together."""
    row = first_conflict(settled)
    if row is not None:
        raise UsageError(row.message(settled))


def _source_blocks(_settled: SettledOptions) -> str:
    return "at precision source, where blocks are the checkpoint's own; leave it out"


def _other_types(s: SettledOptions) -> str:
    options = s.options
    given = "" if options.compute_type is None else f" and --compute-type {options.compute_type}"
    rules = "".join(f" and a rule's {p}" for p in dict.fromkeys(s.ruled) if p in UNQUANTISED)
    return (
        f"--precision {s.precision} with --head-precision {s.head}{given}{rules} asks for "
        f"{' and '.join(s.asked_types)}, and a graph computes in one type; weights in blocks (int8, int4) "
        f"go with each of them"
    )


def _other_target(s: SettledOptions) -> str:
    able = " or ".join(f"--target {name}" for name, row in TARGETS.items() if row.per_channel_int8)
    return (
        f"{s.per_channel[0]} with --target {s.options.target}: per-channel int8 is made for {able} "
        f"alone; --target {s.options.target} takes activations block, which is the default. Leave one of "
        f"them out"
    )


def _cache_types(s: SettledOptions) -> list[str]:
    return [s.compute_type, *(["int8"] if s.int8_cache_possible else [])]


_CHANGED_WEIGHTS: Final = (
    "changes weights whose blocks --precision source would keep; choose fp32, fp16, bf16, int8 or int4"
)

_FOR_EMBEDDINGS: Final = "or --embed none for a language model"

CONFLICTS: Final[tuple[Conflict, ...]] = (
    Conflict(
        "embed",
        ("target",),
        lambda s: s.embeds and s.options.target != "cpu",
        lambda s: (
            f"--embed {s.options.embed} with --target {s.options.target}: a graph that embeds texts is made "
            f"for the CPU; leave out --target, {_FOR_EMBEDDINGS}"
        ),
    ),
    Conflict(
        "embed",
        ("interop",),
        lambda s: s.embeds and s.options.interop is not None,
        lambda s: (
            f"--interop {s.options.interop} with --embed {s.options.embed}: no other runtime loads a graph "
            f"that embeds texts; leave out --interop, {_FOR_EMBEDDINGS}"
        ),
    ),
    Conflict(
        "prompts",
        ("embed",),
        lambda s: s.embeds and s.options.prompts is not None,
        lambda s: (
            f"--prefill-recipe has no effect with --embed {s.options.embed}, whose one graph takes prompts "
            f"alone; give that recipe with --recipe, {_FOR_EMBEDDINGS}"
        ),
    ),
    Conflict(
        "kv_dtype",
        ("embed",),
        lambda s: s.embeds and s.options.kv_dtype is not None,
        lambda s: (
            f"--kv-dtype {s.options.kv_dtype} has no effect with --embed {s.options.embed}, whose graph has "
            f"no KV cache; leave it out, {_FOR_EMBEDDINGS}"
        ),
    ),
    Conflict(
        "stages",
        ("embed",),
        lambda s: s.embeds and s.options.stages is not None,
        lambda s: (
            f"--stages {s.options.stages} with --embed {s.options.embed}: a model that embeds texts is one "
            f"graph; leave out --stages, {_FOR_EMBEDDINGS}"
        ),
    ),
    Conflict(
        "stages",
        ("interop",),
        lambda s: s.options.stages is not None and s.options.interop is not None,
        lambda s: (
            f"--stages {s.options.stages} with --interop {s.options.interop}: no other runtime loads a model "
            f"in stages; leave one of them out"
        ),
    ),
    Conflict(
        "stages",
        ("target",),
        lambda s: s.options.stages is not None and s.target.fixed_shapes,
        lambda s: (
            f"--stages {s.options.stages} with --target {s.options.target}: graphs of fixed shapes are not "
            f"cut; leave out --stages, or choose --target cpu, cuda or another"
        ),
    ),
    Conflict(
        "interop",
        ("target",),
        lambda s: s.options.interop is not None and s.options.target != "cpu",
        lambda s: (
            f"--interop {s.options.interop} with --target {s.options.target}: the graph for another runtime "
            f"is made for the CPU; leave one of them out"
        ),
    ),
    Conflict(
        "prompts",
        ("target",),
        lambda s: s.options.prompts is not None and s.options.target != "cpu",
        lambda s: (
            f"--prefill-recipe with --target {s.options.target}: a graph for prompts is made for the CPU; "
            f"leave one of them out"
        ),
    ),
    Conflict(
        "activations",
        ("target", "rules"),
        lambda s: bool(s.per_channel) and not s.target.per_channel_int8,
        _other_target,
    ),
    Conflict(
        "activations",
        ("precision",),
        lambda s: s.activations is not None and s.precision != "int8",
        lambda s: (
            f"--activations {s.activations} multiplies bytes with bytes, which takes --precision int8 and "
            f"not {s.precision}; leave it out or choose int8"
        ),
    ),
    Conflict(
        "fine_block_size",
        ("activations",),
        lambda s: s.activations is not None and s.options.fine_block_size is not None,
        lambda s: (
            f"--fine-block-size {s.options.fine_block_size} has no effect with --activations "
            f"{s.activations}, where a weight's blocks are its whole rows; leave it out"
        ),
    ),
    Conflict(
        "rules",
        ("precision", "head_precision"),
        lambda s: s.storage is Storage.SOURCE and bool(s.options.rules),
        lambda s: f"{s.options.rules[0].label} has no effect {_source_blocks(s)}",
    ),
    Conflict(
        "precision",
        ("head_precision",),
        lambda s: s.storage is Storage.SOURCE and s.precision != s.head,
        lambda s: (
            f"--precision {s.precision} with --head-precision {s.head}; source is for both or neither, "
            f"since the checkpoint settles the type of every tensor"
        ),
    ),
    Conflict(
        "lora",
        ("precision",),
        lambda s: s.storage is Storage.SOURCE and bool(s.options.lora),
        lambda s: f"--lora {s.options.lora[0].path} {_CHANGED_WEIGHTS}",
    ),
    Conflict(
        "transforms",
        ("precision",),
        lambda s: s.storage is Storage.SOURCE and bool(s.options.transforms),
        lambda s: f"--transform {','.join(s.options.transforms)} {_CHANGED_WEIGHTS}",
    ),
    *(
        no_effect(option, ("precision",), Storage.SOURCE, _source_blocks)
        for option in ("block_size", "fine_block_size", "scale_type", "quantizer", "compute_type")
    ),
    Conflict(
        "precision",
        ("head_precision", "compute_type", "rules", "target"),
        lambda s: len(s.asked_types) > 1,
        _other_types,
    ),
    Conflict(
        "activations",
        ("compute_type", "head_precision", "rules", "precision"),
        lambda s: bool(s.per_channel) and s.compute_type != "float32",
        lambda s: (
            f"{s.per_channel[0]} with {s.compute_type}: the runtime's product of bytes gives float32; leave "
            f"out the setting or what asks for {s.compute_type} (--compute-type, fp16, bf16)"
        ),
    ),
    Conflict(
        "fine_block_size",
        ("precision", "target"),
        lambda s: s.options.fine_block_size is not None and s.precision in UNQUANTISED,
        lambda s: (
            f"--fine-block-size {s.options.fine_block_size} has no effect at precision {s.precision}; leave "
            f"it out or choose int8 or int4"
        ),
    ),
    *(
        no_effect(
            option,
            ("precision", "target"),
            Storage.UNQUANTISED,
            lambda s: f"at precision {s.precision}; leave it out or choose int8 or int4",
        )
        for option in ("block_size", "accuracy_level", "scale_type", "quantizer")
    ),
    *(
        no_effect(
            option,
            ("activations", "head_precision"),
            Storage.PER_CHANNEL,
            lambda s: (
                f"with --activations {s.activations} and --head-precision fp32, which leave no weight in "
                f"blocks; leave it out or choose another head"
            ),
        )
        for option in ("block_size", "accuracy_level", "scale_type", "quantizer")
    ),
    Conflict(
        "accuracy_level",
        ("target", "precision", "head_precision", "rules"),
        lambda s: (
            s.storage in (Storage.RULES, Storage.BLOCKS)
            and s.options.accuracy_level is not None
            and s.target.blocks is not BlockForm.NBITS
        ),
        lambda s: (
            f"--accuracy-level {s.options.accuracy_level} has no effect at --target {s.options.target}, "
            f"whose graph leaves the choice to the runtime; leave it out"
        ),
    ),
    *(
        no_effect(
            option,
            ("rules", "precision", "target"),
            Storage.RULES,
            lambda s: f"at precision {s.precision}, where only rules quantise; set it in them",
        )
        for option in ("block_size", "scale_type", "quantizer")
    ),
    wrong_block_size("block_size", lambda s: s.block_size),
    wrong_block_size("fine_block_size", lambda s: s.fine_block_size),
    Conflict(
        "quantizer",
        ("precision", "head_precision", "rules"),
        lambda s: (
            s.storage is Storage.BLOCKS and s.options.quantizer not in (None, "gptq") and not s.has_int4
        ),
        lambda s: (
            f"--quantizer {s.options.quantizer} has no effect without 4-bit weights; leave it out, or choose "
            "int4 or gptq"
        ),
    ),
    Conflict(
        "scale_type",
        ("compute_type", "precision", "head_precision", "rules", "target"),
        lambda s: (
            s.storage is Storage.BLOCKS
            and s.compute_type != "float32"
            and s.options.scale_type not in (None, s.compute_type)
        ),
        lambda s: (
            f"--scale-type {s.options.scale_type} has no effect where the graph computes in "
            f"{s.compute_type}, which scales are then rounded to; leave it out"
        ),
    ),
    beyond_target("precision", ("target",), lambda s: s.precision, table=False),
    beyond_target("head_precision", ("target", "precision", "compute_type"), lambda s: s.head, table=True),
    Conflict(
        "compute_type",
        ("target",),
        lambda s: s.compute_type not in s.target.compute_types,
        lambda s: (
            f"--compute-type is {s.compute_type}; --target {s.options.target} computes in "
            f"{' or '.join(s.target.compute_types)}"
        ),
    ),
    Conflict(
        "kv_dtype",
        ("target", "compute_type", "precision", "head_precision", "rules"),
        lambda s: s.options.kv_dtype is not None and s.options.kv_dtype not in _cache_types(s),
        lambda s: (
            f"--kv-dtype is {s.options.kv_dtype}; --target {s.options.target} computing in {s.compute_type} "
            f"takes {' or '.join(_cache_types(s))}"
        ),
    ),
    Conflict(
        "activations",
        ("transforms",),
        lambda s: s.activations == "static" and "rotate" not in s.options.transforms,
        lambda _: (
            "--activations static without a rotation lets a few large channels settle the step of all (0.14 "
            "nats on SmolLM2-135M); add --transform rotate if the model is one that can be rotated "
            "(docs/families.md), or choose --activations row"
        ),
    ),
)
