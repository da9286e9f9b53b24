"""A second oracle for GGUF files: llama.cpp on the very file, through llama-cpp-python where that is
installed.

It keeps weights as they are stored and rounds activations to match: not at all for F32, to half precision for
F16, to 8 bits in blocks for the quantised types.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from llorch_export.checkpoint.base import Checkpoint
from llorch_export.recipes.kl_limits import KL_LIMIT
from llorch_export.verify.layers.stages import Kind, Measure, Stage, Tolerance, compare, judged
from llorch_serve.artifact.manifest import Recipe
from llorch_serve.errors import ArtifactError, ProviderError, UsageError
from llorch_serve.fidelity.divergence import DivergenceSum, Logits

_F32_CACHE: Final = 0  # GGML_TYPE_F32; llama.cpp's default cache is F16
_ROUNDING: Final = {"F32": 0.0, "F16": 1e-5}
_ROUNDING_OF_THE_REST: Final = 0.01
"""Nats that llama.cpp's rounding of activations may add, by the type of the file's matrices.

Measured on SmolLM2-135M: F16 1.2e-6, Q8_0 0.0038."""


def check_llama_cpp(checkpoint: Checkpoint) -> None:
    """Raise UsageError if the source is not a GGUF file alone, ProviderError if llama-cpp-python is
    missing.
    """
    if checkpoint.adapters:
        raise UsageError("--llama-cpp runs the file without the adapter of --lora; leave one of them out")
    if checkpoint.kind != "gguf":
        raise UsageError(f"--llama-cpp needs a GGUF file and {checkpoint.path} is none; leave it out")
    _import()


def llama_cpp_logits(path: Path, token_ids: list[int]) -> Logits:
    """Return llama.cpp's logits of every position, [tokens, vocabulary]. Raises ArtifactError if it refuses
    the file.
    """
    count = len(token_ids)
    try:
        model = _import().Llama(
            str(path),
            n_ctx=count,
            n_batch=count,
            n_gpu_layers=0,
            logits_all=True,
            type_k=_F32_CACHE,
            type_v=_F32_CACHE,
            verbose=False,
        )
        model.eval(token_ids)
    except (ValueError, RuntimeError) as error:
        raise ArtifactError(f"llama.cpp cannot run {path}: {' '.join(str(error).split())[:300]}") from error
    return np.array(model.scores[:count], np.float32)


def compare_llama_cpp(checkpoint: Checkpoint, token_ids: list[int], logits: Logits, recipe: Recipe) -> Stage:
    """Compare an artifact's logits with llama.cpp's: as they are where neither rounds, else by divergence."""
    expected = llama_cpp_logits(checkpoint.path, token_ids)
    rounding = max(
        _ROUNDING.get(tensor.dtype, _ROUNDING_OF_THE_REST)
        for tensor in checkpoint.tensors.values()
        if len(tensor.shape) > 1
    )
    name, kind = "logits/llama.cpp", Kind.LLAMA_CPP
    if rounding == 0 and recipe.kl_limit <= KL_LIMIT["fp32"]:
        return compare(name, kind, None, "observed", expected, logits, recipe)
    divergence = DivergenceSum()
    divergence.add(expected, logits)
    figures = divergence.result()
    allowed = Tolerance(Measure.KL, recipe.kl_limit + rounding)
    return judged(name, kind, None, "observed", allowed, figures.kl, max_abs=figures.max_abs)


def _import() -> Any:
    try:
        import llama_cpp
    except ImportError as error:
        raise ProviderError(
            f"llama_cpp cannot be imported ({error}); install it with: pip install llama-cpp-python"
        ) from error
    return llama_cpp
