"""What ``llorch export`` prints: the result of an export, or the preview of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llorch_serve.terminal.console import note, say, write, write_json

if TYPE_CHECKING:
    from llorch_export.pipeline import ExportResult
    from llorch_serve.artifact.manifest import Manifest


def show_result(
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
        note(notice)
    _say_limits(manifest, max_context)


def _say_limits(manifest: Manifest, max_context: int | None) -> None:
    """Say why the context is shorter than the model's, and that answers may not end, where that is so."""
    model = manifest.model
    if max_context is None and manifest.context_length < model.max_position_embeddings:
        say(
            f"note: the context is {manifest.context_length} of the model's {model.max_position_embeddings} "
            f"positions, because its rotary type {model.rope.kind} rotates otherwise in longer sequences, "
            f"which no fixed table reproduces"
        )
    if not manifest.stop_token_ids:
        say("note: the checkpoint names no end-of-sequence token; answers end at max_tokens or a stop string")


def show_preview(preview: Any, *, as_json: bool) -> None:
    """Print what an export would make: tensors, inputs and sizes."""
    if as_json:
        write_json(preview)
        return
    for tensor in preview["tensors"]:
        write(f"{tensor['name']:<60} {tensor['shape']}\n")
    for tensor in preview["inputs"][:6]:
        write(f"input  {tensor['name']:<53} {tensor['shape']} {tensor['dtype']}\n")
    more = preview["prompt_data_bytes"]
    prompts = "" if more is None else f"{more / 2**20:,.1f} MiB more for prompts; "
    active = preview["active_parameters"]
    of_experts = "" if active == preview["parameters"] else f", {active:,} of them for one token"
    write(
        f"{preview['parameters']:,} parameters{of_experts}; "
        f"{preview['data_bytes'] / 2**20:,.1f} MiB of weights; "
        f"{prompts}KV cache {preview['kv_bytes_per_token']:,} bytes a token in {preview['kv_dtype']}\n"
    )
    for number, stage in enumerate(preview["stages"]):
        write(f"stage {number}: layers {stage['first_layer']} to {stage['end_layer'] - 1}\n")
    for notice in preview["notices"]:
        note(notice)
