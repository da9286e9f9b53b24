"""What an export would make, without reading a weight: ``llorch export --dry-run``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from llorch_export.artifact.companions import planned, prompt_recipe
from llorch_export.calibration.measurements import require_use
from llorch_export.checkpoint.base import LazyTensor
from llorch_export.checkpoint.lora import merged_tensors
from llorch_export.checkpoint.names import expected_tensors, parameters
from llorch_export.formats.module import uses_static
from llorch_export.graph.static_scales import check_static
from llorch_export.options import ExportOptions
from llorch_export.pipeline import check_source, choosing_rules, resolve_context, resolved_recipe
from llorch_export.recipes.default import with_quantizer
from llorch_export.source.open import open_checkpoint, open_config
from llorch_export.transform.prepare import fixed_transforms
from llorch_serve.artifact.manifest import KvDtype


def preview(options: ExportOptions) -> dict[str, object]:
    """Describe the export without reading a weight: tensors and shapes of the checkpoint, graph inputs,
    sizes.

    Of a rule that chooses modules by a text, the first that it may choose stand for those that it will.
    Needs only the GGUF header or config.json; at precision source a whole GGUF file. Raises as
    :func:`llorch_export.pipeline.export` does.
    """
    recipe = options.recipe()
    tensors: Mapping[str, LazyTensor]
    if recipe.precision == "source":
        # What the graph holds depends on the type of every tensor, so config.json would not do.
        checkpoint = open_checkpoint(options.source)
        check_source(recipe, checkpoint)
        config, tensors = checkpoint.config, checkpoint.tensors
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
    else:
        config = open_config(options.source)
        shapes = expected_tensors(config)
        tensors = {name: LazyTensor(name, shape, "", _unread) for name, shape in shapes.items()}
    options = with_quantizer(options, config)
    recipe = resolved_recipe(options, config)
    chooses, _ = choosing_rules(options)
    may_measure = uses_static(recipe) or bool(chooses) or options.prompts_may_measure
    require_use(recipe, options.calibration, may_measure=may_measure)
    check_static(recipe, options.calibration)
    context_length = resolve_context(config, options.max_context)
    if options.lora is not None:
        tensors = merged_tensors(tensors, options.lora)
    built, tensors = fixed_transforms(config, tensors, recipe)
    prompts = prompt_recipe(options, recipe, config)
    graph, prompt_bytes = planned(built, tensors, recipe, prompts, context_length, options.target)
    kv_dtype: KvDtype = "int8" if recipe.int8_cache else graph.kv.dtype
    return {
        "config": config,
        "recipe": recipe,
        "context_length": context_length,
        "parameters": parameters(config),
        "data_bytes": graph.data_bytes,
        "prompt_recipe": prompts,
        "prompt_data_bytes": prompt_bytes,
        "kv_dtype": kv_dtype,
        "kv_bytes_per_token": msgspec.structs.replace(graph.kv, dtype=kv_dtype).bytes_per_token,
        "tensors": [{"name": name, "shape": list(shape)} for name, shape in shapes.items()],
        "inputs": [
            {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype} for spec in graph.inputs
        ],
    }


def _unread(_start: int, _stop: int) -> npt.NDArray[np.float32]:
    raise AssertionError("a preview reads no weights")
