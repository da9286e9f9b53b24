"""Answer ``llorch inspect``: what is in an artifact, for people or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from llorch_serve.terminal.console import say, write, write_json

if TYPE_CHECKING:
    from llorch_export.inspect.contents import Contents
    from llorch_serve.artifact.manifest import EmbeddingForm, Recipe, SourceInfo


def command(
    artifact: Annotated[Path, typer.Argument(metavar="DIR", help="Artifact folder.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Show what is in an artifact: config, recipe, operators, sizes, and the memory it takes.

    Reads no weights and starts no runtime. Operators and bytes by purpose need the export extra; without it
    they are left out, and a note says so.

    For example:

        llorch inspect artifacts/smollm2

    """
    from llorch_export.inspect.contents import contents
    from llorch_serve.artifact.folder import load_artifact

    found = contents(load_artifact(artifact))
    if found.graph is None:
        say(
            "note: onnx is not installed, so the graph was not read; install it with: pip install "
            "'llorch[export]'"
        )
    if as_json:
        write_json(found)
    else:
        write(describe(found))


# A line stays one, whatever names a stranger put into a manifest.
_BREAKS: Final = dict.fromkeys(map(ord, "\n\r\v\f\x1b\x85\u2028\u2029"), " ")


def describe(found: Contents) -> str:
    """Return the description as lines of text."""
    lines = [
        f"{'model':<14}{found.model_id}",
        f"{'source':<14}{_source(found.source)}",
        f"{'fingerprint':<14}{found.fingerprint}",
        f"{'made with':<14}{_pairs(found.versions)}; runs on onnxruntime {found.min_onnxruntime} or later",
        f"{'target':<14}{_target(found)}",
        f"{'config':<14}{_pairs(_set(msgspec.to_builtins(found.model)))}",
        f"{'recipe':<14}{_recipe(found.recipe)}",
        *(
            []
            if found.prompts is None
            else [f"{'prompts':<14}{found.prompts.graph}: {_recipe(found.prompts.recipe)}"]
        ),
        f"{'graph':<14}{'traced by Optimum' if found.layout == 'optimum' else 'llorch'}"
        + ("" if found.embedding is None else f"; {_embedding(found.embedding)}")
        + (f"; also loads in {', '.join(found.interop)}" if found.interop else ""),
        f"{'context':<14}{found.context_length} tokens",
        f"{'stop tokens':<14}{', '.join(f'{t.id} {t.text!r}' for t in found.stop_tokens) or 'none'}",
        f"{'chat':<14}{'template' if found.chat_template else 'no template'}; "
        f"recommended sampling: {_pairs(_set(msgspec.to_builtins(found.generation))) or 'none'}",
    ]
    lines += [
        f"{label:<14}{', '.join(names)}"
        for label, names in (("ignored", found.ignored_settings), ("code not run", found.code_not_run))
        if names
    ]
    memory = _memory(found) if found.embedding is None else ()
    shown = [*lines, *_graph(found), *_files(found), *memory, *_stages(found)]
    return "".join(f"{line.translate(_BREAKS)}\n" for line in shown)


def _source(source: SourceInfo) -> str:
    adapter = "" if source.adapter is None else f", with adapter {source.adapter}"
    at = f"@{source.revision}" if isinstance(source.revision, str) else ""
    prefix = f"{source.hub}://" if isinstance(source.hub, str) else ""
    hub = f", from {prefix}{source.repository}{at}" if isinstance(source.repository, str) else ""
    return f"{source.name} ({source.kind}), {source.fingerprint[:16]}{adapter}{hub}"


def _embedding(form: EmbeddingForm) -> str:
    pooled = "the last token's state" if form.pooling == "last" else "the mean of all states"
    return f"gives a vector for each text: {pooled}{', of length 1' if form.normalised else ''}"


def _recipe(recipe: Recipe) -> str:
    """Return a recipe's settings; of its rules the number, since how each module is stored is told below."""
    settings = msgspec.to_builtins(recipe)
    settings["rules"] = len(recipe.rules) or None
    return _pairs(_set(settings))


def _target(found: Contents) -> str:
    missing = "" if found.not_checked_on is None else f", not run on {found.not_checked_on}"
    fixed = found.fixed_shapes
    shapes = "" if fixed is None else f"; fixed shapes: 1 sequence, {fixed.prefill_tokens} tokens or 1"
    return f"{found.target}; compared with the reference on {', '.join(found.checked_on)}{missing}{shapes}"


def _graph(found: Contents) -> Iterator[str]:
    if found.graph is None:
        return
    yield (
        f"{'operators':<14}{sum(found.graph.ops.values())}: {_pairs(found.graph.ops)}; opset "
        f"{_pairs(found.graph.opset)}"
    )
    from llorch_export.inspect.modules import described, patterns

    for pattern, module in described(found.graph.modules):
        blocks = "" if module.block_size is None else f"block {module.block_size}"
        zeros = "zero points" if module.zero_points else ""
        yield (
            f"{'stored':<14}{pattern:<44} {module.precision:<5} {blocks:<10}{zeros:<12} "
            f"{module.bits_per_weight:.3f} bits"
        )
    for form in found.source_forms:
        for pattern in patterns(form.modules):
            yield f"{'carried':<14}{pattern:<44} {form.stored}: {form.becomes}"
    for purpose, count in found.graph.weight_bytes.items():
        yield f"{'weights':<14}{purpose:<20} {_size(count):>12}"


def _files(found: Contents) -> Iterator[str]:
    for entry in found.files:
        yield f"{'file':<14}{entry.path:<20} {_size(entry.bytes):>12}  {entry.sha256[:16]}"


def _memory(found: Contents) -> Iterator[str]:
    yield (
        f"{'KV cache':<14}{' or '.join(found.kv_dtypes)}, {found.kv_bytes_per_token} bytes a token in "
        f"{found.kv_dtypes[0]}; committed as it is used, at most:"
    )
    yield f"{'':<14}{'slots':>5} {'context':>9} {'KV cache':>12} {'with weights':>12}"
    for row in found.memory:
        yield (
            f"{'':<14}{row.slots:>5} {row.context:>9} {_size(row.kv_bytes):>12} {_size(row.total_bytes):>12}"
        )


def _stages(found: Contents) -> Iterator[str]:
    for number, stage in enumerate(found.stages):
        first, end = stage.layers
        needs = [
            f"weights {_size(stage.weight_bytes)}",
            f"KV cache {stage.kv_bytes_per_token:,} bytes a token, {_size(stage.kv_bytes)} for "
            f"{found.context_length} tokens",
        ]
        if stage.activation_bytes is not None:
            needs.append(f"activations {_size(stage.activation_bytes)} in a call of {stage.tokens} tokens")
        if stage.taken_bytes_per_token:
            needs.append(f"takes {stage.taken_bytes_per_token:,} bytes a token")
        yield f"{f'stage {number}':<14}layers {first} to {end - 1}: {'; '.join(needs)}"
        yield f"{'':<14}{', '.join(stage.files)}"


def _set(values: dict[str, object]) -> dict[str, object]:
    """Leave out what is not set."""
    return {key: value for key, value in values.items() if value is not None and value != ()}


def _pairs(values: dict[str, object] | dict[str, int] | dict[str, str]) -> str:
    return ", ".join(f"{key} {_plain(value)}" for key, value in values.items())


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return f"({_pairs(_set(value))})"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count:,} B"
