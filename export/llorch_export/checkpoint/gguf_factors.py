"""Numbers of each layer that a folder has as tensors, and a GGUF file in its metadata: those of xIELU.

Input is a checked header; output are tensors of one number, as a folder's. Without such an activation there
are none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.base import LazyTensor
from llorch_export.checkpoint.names import XIELU
from llorch_export.config.fields import quoted
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError

_LARGEST: Final = float(np.finfo(np.float32).max)


def factor_tensors(metadata: Mapping[str, object], config: LlamaConfig, origin: str) -> dict[str, LazyTensor]:
    """Return the factors of every layer's activation, by the names of a folder's tensors.

    Raises ArtifactError if a file has none, or others than one finite number for all or for each layer.
    """
    if config.form.activation != "xielu":
        return {}
    found = {}
    for name in XIELU:
        numbers = _numbers(metadata, f"xielu.{name.rpartition('.')[2]}", config.num_hidden_layers, origin)
        for layer, number in enumerate(numbers):
            tensor = f"model.layers.{layer}.mlp.{name}"
            found[tensor] = _tensor(tensor, number)
    return found


def without_factors(config: LlamaConfig) -> LlamaConfig:
    """Return the config of a model that has the same tensors but for those of :func:`factor_tensors`."""
    if config.form.activation != "xielu":
        return config
    return msgspec.structs.replace(config, layer_form=msgspec.structs.replace(config.form, activation="silu"))


def _numbers(metadata: Mapping[str, object], key: str, layers: int, origin: str) -> list[float]:
    stated = metadata.get(key)
    numbers: list[Any] = list(stated) if isinstance(stated, (list, tuple)) else [stated] * layers
    values = [float(each) for each in numbers if type(each) in (int, float) and abs(each) <= _LARGEST]
    if len(values) != layers or len(numbers) != layers or not all(map(math.isfinite, values)):
        raise ArtifactError(
            f"{origin}: {key} is {quoted(stated)}, expected a finite number for each of {layers} layers; "
            "convert the model again"
        )
    return values


def _tensor(name: str, number: float) -> LazyTensor:
    def rows(start: int, stop: int) -> npt.NDArray[np.float32]:
        return np.full(1, number, np.float32)[start:stop]

    return LazyTensor(name=name, shape=(1,), dtype="F32", load_rows=rows)
