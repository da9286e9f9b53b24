"""GGUF files as checkpoints.

Input is a checked :class:`GgufHeader`; output are a config, and lazy tensors under Hugging Face's names with
the rows of the query and key projections back in Hugging Face's order.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint import names
from llorch_export.checkpoint.base import LazyTensor
from llorch_export.checkpoint.ggml_types import BLOCK_TYPES, type_name
from llorch_export.checkpoint.gguf_factors import factor_tensors, without_factors
from llorch_export.checkpoint.gguf_header import GgufHeader, GgufTensor
from llorch_export.checkpoint.gguf_parts import model_stem
from llorch_export.checkpoint.row_order import row_order
from llorch_export.checkpoint.stream import (
    FLOAT_CODECS,
    BlockCodec,
    TensorRange,
    read_blocks,
    read_float32,
    read_rows,
)
from llorch_export.config.experts import BY_EXPERT, GGUF_STACKED, ExpertNames
from llorch_export.config.families import FAMILIES
from llorch_export.config.fields import shown
from llorch_export.config.gguf import config_from_gguf
from llorch_export.config.gguf_rope import GgufRopeTensors
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError
from llorch_serve.files.text import writable

SUPPORTED_TYPES: Final = (*FLOAT_CODECS, *BLOCK_TYPES)

_ROPE_FACTORS: Final = "rope_freqs.weight"
_SHORT_FACTORS: Final = "rope_factors_short.weight"
_LONG_FACTORS: Final = "rope_factors_long.weight"
_MAX_ROPE_FACTORS: Final = 1024
_FUSED_QKV: Final = "self_attn.qkv_proj"
# Rotary frequencies that old conversions stored with each layer; they follow from the metadata.
_IGNORABLE: Final = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?")
_QUANTISATION_SUFFIX: Final = re.compile(r"[.-](F32|F16|BF16|(I|T)?Q\d\w*|(MX|NV)FP4\w*)$", re.IGNORECASE)


def gguf_config(header: GgufHeader) -> LlamaConfig:
    """Return the config of a GGUF file. Raises ArtifactError for anything that is not understood."""
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    rope_tensors = GgufRopeTensors(
        plain=_rope_factors(header, _ROPE_FACTORS),
        short=_rope_factors(header, _SHORT_FACTORS),
        long=_rope_factors(header, _LONG_FACTORS),
    )
    return config_from_gguf(header.metadata, shapes, rope_tensors=rope_tensors, origin=str(header.path))


def _rope_factors(header: GgufHeader, name: str) -> list[float] | None:
    """Return the rotary divisors that a tensor holds, or None if there is no such tensor."""
    tensor = header.tensors.get(name)
    if tensor is None:
        return None
    # Read before any config exists that could tell its size, so it is bounded here.
    if len(tensor.shape) != 1 or tensor.shape[0] > _MAX_ROPE_FACTORS:
        raise ArtifactError(
            f"{header.path}: {name} has shape {list(tensor.shape)}, expected one number a rotary pair; "
            "convert the model again"
        )
    return [float(value) for value in read_float32(_tensor_range(tensor))]


def gguf_tensors(header: GgufHeader, config: LlamaConfig) -> Mapping[str, LazyTensor]:
    """Return exactly the tensors that ``config`` calls for.

    Raises ArtifactError naming tensors that are missing, unused, of a wrong shape, of an unsupported type or
    that reach beyond the end of the file.
    """
    ranges = {name: _tensor_range(tensor) for name, tensor in header.tensors.items()}
    found = {
        name: r.shape
        for name, r in ranges.items()
        if name not in (_ROPE_FACTORS, _SHORT_FACTORS, _LONG_FACTORS) and not _IGNORABLE.fullmatch(name)
    }
    experts, fused = _expert_names(config, found), _fused_modules(config, found)
    factors = factor_tensors(header.metadata, config, str(header.path))
    stored = without_factors(config)
    wanted = names.stored_tensors(stored, experts, gguf=True, fused=fused)
    for name, shape in wanted.items():
        if shape[0] == 1 and found.get(name) == shape[1:]:  # one row is stored as a vector
            ranges[name] = dataclasses.replace(ranges[name], shape=shape)
            found[name] = shape
    names.check_tensors(wanted, found, origin=str(header.path))
    expected = names.expected_tensors(config)
    tensors = {}
    for name, place in names.stored_places(stored, experts, gguf=True, fused=fused).items():
        whole = ranges[place.name] if place.stack is None else ranges[place.name].as_matrix()
        source = whole.rows(place.start, place.stop)
        tensors[name] = LazyTensor(
            name=name,
            shape=expected[name],
            dtype=_type_name(header.tensors[place.name]),
            load_rows=functools.partial(read_rows, source, row_order=row_order(name, config, gguf=True)),
            read_blocks=_block_reader(source, row_order(name, config, gguf=True)),
        )
    tensors |= factors
    return {name: tensors[name] for name in expected}


def _expert_names(config: LlamaConfig, found: Collection[str]) -> ExpertNames | None:
    """Return how a file keeps experts: all of a layer in one tensor, or each by itself as before 2024."""
    if not config.experts:
        return None
    return BY_EXPERT if "blk.0.ffn_down.0.weight" in found else GGUF_STACKED


def _fused_modules(config: LlamaConfig, found: Collection[str]) -> tuple[str, ...]:
    """Return what a file stores instead of its parts: q, k and v may lie in one or apart, in every family."""
    fused = FAMILIES[config.architecture].fused
    if _FUSED_QKV not in fused:
        return (*fused, _FUSED_QKV) if "blk.0.attn_qkv.weight" in found else fused
    apart = "blk.0.attn_q.weight" in found
    return tuple(module for module in fused if module != _FUSED_QKV) if apart else fused


def gguf_model_name(path: Path) -> str:
    """Return the model's name as far as the file's name tells it, without the type of quantisation."""
    stem = model_stem(path)
    return writable(_QUANTISATION_SUFFIX.sub("", stem) or stem)


def _block_reader(
    source: TensorRange, row_order: npt.NDArray[np.intp] | None
) -> Callable[[int, int], npt.NDArray[np.uint8]] | None:
    if source.codec.elements == 1 or len(source.shape) != 2:
        return None
    return functools.partial(read_blocks, source, row_order=row_order)


def _type_name(tensor: GgufTensor) -> str:
    name = type_name(tensor.type_id)
    if name not in SUPPORTED_TYPES:
        raise ArtifactError(
            f"{tensor.path}: tensor {shown(tensor.name)} has storage type {name}; supported are "
            f"{', '.join(SUPPORTED_TYPES)}. "
            "Use a file of one of these types"
        )
    return name


def _tensor_range(tensor: GgufTensor) -> TensorRange:
    codec = _codec(_type_name(tensor))
    if tensor.shape[-1] % codec.elements:
        raise ArtifactError(
            f"{tensor.path}: tensor {shown(tensor.name)} has rows of {tensor.shape[-1]} elements, "
            f"expected a multiple of {codec.elements}; the file is damaged, fetch it again"
        )
    elements = 1
    for dim in tensor.shape:
        elements *= dim
    end = tensor.offset + elements // codec.elements * codec.bytes
    if end > tensor.file_size:
        raise ArtifactError(
            f"{tensor.path} has {tensor.file_size} bytes, but tensor {shown(tensor.name)} ends at byte "
            f"{end}; it is truncated, fetch it again"
        )
    return TensorRange(tensor.name, tensor.path, tensor.offset, tensor.shape, codec, tensor.real)


@functools.cache
def _codec(name: str) -> BlockCodec:
    if name in FLOAT_CODECS:
        return FLOAT_CODECS[name]
    row = BLOCK_TYPES[name]
    return BlockCodec(row.elements, row.size, row.decode)
