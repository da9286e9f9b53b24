"""What an export would make, without reading a weight: ``llorch export --dry-run``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from llorch_export.adapter.apply import adapt, adapter_notices
from llorch_export.adapter.text import adapted_text
from llorch_export.artifact.companions import planned
from llorch_export.checkpoint.base import LazyTensor, TokenizerAssets
from llorch_export.checkpoint.names import active_parameters, expected_tensors, parameters
from llorch_export.config.hf import ReadConfig
from llorch_export.config.packed.base import Packing
from llorch_export.config.unread import notice_of
from llorch_export.options import ExportOptions
from llorch_export.pipeline import storage_notices
from llorch_export.recipes.base import base_recipe
from llorch_export.resolved import check_source, resolve, with_packed_defaults
from llorch_export.source.open import open_checkpoint, open_settings, open_text
from llorch_export.staged import cut_into_stages
from llorch_export.transform.lazy import Tensors
from llorch_export.transform.prepare import fixed_transforms
from llorch_serve.artifact.manifest import KvDtype, Recipe


def preview(options: ExportOptions) -> dict[str, object]:
    """Describe the export without reading a weight: tensors and shapes of the checkpoint, graph inputs,
    sizes.

    Of a rule that chooses modules by a text, the first that it may choose stand for those that it will.
    Needs only the GGUF header or config.json; at precision source a whole GGUF file. Raises as
    :func:`llorch_export.pipeline.export` does.
    """
    read, tensors, text, notices = _opened(options, base_recipe(options))
    adapted = adapt(read.config, tensors, options.lora, source=Path(options.source).name)
    config, tensors, adapters = adapted.config, adapted.tensors, adapted.adapters
    if text is not None:
        adapters = adapted_text(text, adapters, config.vocab_size)[1]
        notices = (*notices, *text.notices)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    resolved = resolve(with_packed_defaults(tensors, options, read.embedding), config, read.embedding)
    embeds = resolved.embedding is not None
    resolved = cut_into_stages(resolved, config, tensors)
    graph, prompts = planned(resolved, *fixed_transforms(config, tensors, resolved.recipe, embeds=embeds))
    carried = storage_notices(tensors, resolved)
    kv_dtype: KvDtype = "int8" if resolved.recipe.int8_cache else graph.kv.dtype
    return {
        "config": config,
        "recipe": resolved.recipe,
        "context_length": resolved.context_length,
        "parameters": parameters(config),
        "active_parameters": active_parameters(config),
        "notices": (
            *notice_of(read.ignored_settings, read.code_not_run),
            *notices,
            *(() if read.embedding is None else read.embedding.notices),
            *adapter_notices(adapters),
            *carried,
            *graph.notices,
        ),
        "data_bytes": graph.data_bytes,
        "prompt_recipe": resolved.prompts,
        "prompt_data_bytes": None if prompts is None else prompts.data_bytes,
        "stages": [{"first_layer": part.start, "end_layer": part.stop} for part in resolved.stages],
        "kv_dtype": kv_dtype,
        "kv_bytes_per_token": msgspec.structs.replace(graph.kv, dtype=kv_dtype).bytes_per_token,
        "tensors": [{"name": name, "shape": list(shape)} for name, shape in shapes.items()],
        "inputs": [
            {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype} for spec in graph.inputs
        ],
    }


def _opened(
    options: ExportOptions, recipe: Recipe
) -> tuple[ReadConfig, Tensors, TokenizerAssets | None, tuple[str, ...]]:
    """Return what the config says; tensors that have shapes and, but at precision source, no content; what
    text needs, where it is at hand; and notices about the weights, where their files were read.
    """
    if recipe.precision == "source":
        # What the graph holds depends on the type of every tensor, so config.json would not do.
        checkpoint = open_checkpoint(options.source, options.embed)
        check_source(recipe, checkpoint)
        read = ReadConfig(checkpoint.config, checkpoint.ignored_settings, checkpoint.code_not_run)
        read = replace(read, embedding=checkpoint.embedding)
        return read, checkpoint.tensors, checkpoint.tokenizer, checkpoint.notices
    read = open_settings(options.source, options.embed)
    shapes = expected_tensors(read.config)
    tensors = {name: LazyTensor(name, shape, "", _unread) for name, shape in shapes.items()}
    notices = read.packing.notices if isinstance(read.packing, Packing) else ()
    return read, tensors, open_text(options.source, options.embed), notices


def _unread(_start: int, _stop: int) -> npt.NDArray[np.float32]:
    raise AssertionError("a preview reads no weights")
