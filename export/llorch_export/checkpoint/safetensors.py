"""Hugging Face folders as checkpoints.

Input is a :class:`ModelFolder`; output are lazy tensors out of its safetensors files. The safetensors library
checks each file's header (sizes, overlaps, holes); tensors are then read, not mapped, one piece at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from llorch_export.checkpoint import names
from llorch_export.checkpoint.base import LazyTensor
from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.checkpoint.fp8 import ACTIVATION_SCALES, FP8_CODECS, SCALES, WEIGHT, scaled_rows
from llorch_export.checkpoint.stream import FLOAT_CODECS, TensorRange, read_rows, same_bytes
from llorch_export.config.fp8 import Fp8Format
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError

SINGLE: Final = "model.safetensors"
_CODECS: Final = FLOAT_CODECS | FP8_CODECS
INDEX: Final = "model.safetensors.index.json"
CONVERT_PICKLE: Final = (
    "weights in .bin, .pt or .pth files are never read, because loading them can run code; if you trust "
    "them, convert with "
    "transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER), then export "
    "NEW_FOLDER"
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place, its type's name, and the place of the scale that fp8 weights may have."""

    source: TensorRange
    dtype: str
    scale: TensorRange | None = None


def weight_files(folder: ModelFolder) -> tuple[Path, ...]:
    """Return the safetensors files that make up the model: those of the index if there is one, else the
    single file.

    Raises ArtifactError if there are none, or if one that the index names is missing or outside the folder.
    """
    index = _weight_map(folder)
    if index is None:
        path = folder.find(SINGLE)
        if path is None:
            raise ArtifactError(f"{folder.path} holds neither {SINGLE} nor {INDEX}; {_other_weights(folder)}")
        return (path,)
    shards = {name: folder.find(name) for name in sorted(set(index.values()))}
    missing = [name for name, path in shards.items() if path is None]
    if missing:
        raise ArtifactError(
            f"{folder.path} lacks {', '.join(missing[:8])}, which {INDEX} names ({len(missing)} of "
            f"{len(shards)} shards); "
            "fetch the model again"
        )
    return tuple(path for path in shards.values() if path is not None)


def folder_tensors(
    folder: ModelFolder, config: LlamaConfig, packing: Fp8Format | None = None
) -> Mapping[str, LazyTensor]:
    """Return exactly the tensors that ``config`` calls for.

    packing: how fp8 weights are scaled; None: they stand for themselves.
    Raises ArtifactError naming files that are missing or damaged, and tensors that are missing, unused,
    doubly stored, of a wrong shape or of an unsupported type.
    """
    index = _weight_map(folder)
    stored: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        for name, tensor in file_tensors(path).items():
            if name in stored:
                raise ArtifactError(
                    f"{path} and {stored[name].source.path.name} both hold tensor {name}; remove the file "
                    f"that is not part of the model"
                )
            stored[name] = tensor
    if index is not None:
        for name, shard in index.items():
            if names.is_ignorable(name):
                continue
            if name not in stored or stored[name].source.path.name != shard:
                raise ArtifactError(
                    f"{folder.path / shard} lacks tensor {name}, which {INDEX} says it holds; fetch the "
                    f"model again"
                )
    if packing is not None:
        _take_scales(stored)
    if config.tie_word_embeddings and names.HEAD in stored and names.EMBEDDING in stored:
        _drop_tied_head(stored, folder)
    found = {name: tensor.source.shape for name, tensor in stored.items()}
    names.check_tensors(names.stored_tensors(config), found, origin=str(folder.path))
    places, expected = names.stored_places(config), names.expected_tensors(config)
    return {
        name: LazyTensor(
            name=name,
            shape=expected[name],
            dtype=stored[place.name].dtype,
            load_rows=_reader(stored[place.name], place, packing),
        )
        for name, place in places.items()
    }


def _take_scales(stored: dict[str, StoredTensor]) -> None:
    """Move the scales of fp8 weights to their weights, and drop those of activations, which are not rounded
    here.
    """
    for name, tensor in list(stored.items()):
        if tensor.dtype not in FP8_CODECS:
            continue
        module = name.removesuffix(WEIGHT)
        scales = [stored.pop(key) for suffix in SCALES if (key := f"{module}{suffix}") in stored]
        if len(scales) != 1 or len(tensor.source.shape) != 2:
            raise ArtifactError(
                f"{tensor.source.path}: tensor {name} of type {tensor.dtype} has {len(scales)} scales and "
                f"{len(tensor.source.shape)} dimensions, expected a matrix with one of "
                f"{' or '.join(SCALES)}; "
                "fetch the model again"
            )
        stored[name] = dataclasses.replace(tensor, scale=scales[0].source)
        for suffix in ACTIVATION_SCALES:
            stored.pop(f"{module}{suffix}", None)


def _reader(
    tensor: StoredTensor, place: names.StoredRows, packing: Fp8Format | None
) -> Callable[[int, int], npt.NDArray[np.float32]]:
    """Return what reads rows of one part of a stored tensor, the whole of it unless projections are fused."""
    if tensor.scale is None or packing is None:
        return functools.partial(read_rows, tensor.source.rows(place.start, place.stop))
    # Scales stand for blocks of the whole tensor, so its own row numbers are kept.
    whole = scaled_rows(tensor.source, tensor.scale, packing)
    return lambda start, stop: whole(place.start + start, place.start + stop)


def _drop_tied_head(stored: dict[str, StoredTensor], folder: ModelFolder) -> None:
    """Remove a stored head that repeats the embedding; one that differs would be silently lost by tying."""
    head, embedding = stored[names.HEAD], stored[names.EMBEDDING]
    if (
        head.dtype != embedding.dtype
        or head.scale
        or embedding.scale
        or not same_bytes(head.source, embedding.source)
    ):
        raise ArtifactError(
            f"{folder.path}: config.json ties the head to the embedding, but {names.HEAD} differs from "
            f"{names.EMBEDDING}; "
            "set tie_word_embeddings to false if the head is meant, or remove the tensor"
        )
    del stored[names.HEAD]


def _weight_map(folder: ModelFolder) -> Mapping[str, str] | None:
    index = folder.read_json(INDEX)
    if index is None:
        return None
    weight_map = index.get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(v, str) for v in weight_map.values())
    ):
        raise ArtifactError(
            f"{folder.path / INDEX} has no weight_map of tensor names to file names; fetch it again"
        )
    for name in set(weight_map.values()):
        if not name.endswith(".safetensors"):
            raise ArtifactError(
                f"{folder.path / INDEX} names the file {name!r}, expected only .safetensors files; "
                f"{CONVERT_PICKLE}"
            )
    return weight_map


def file_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of one safetensors file, by name. Raises ArtifactError if it is damaged."""
    try:
        # Opened for its checks only, and closed at once: its mapping would count as this process's memory.
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except SafetensorError as error:
        raise ArtifactError(f"{path} is truncated or damaged ({error}); fetch it again") from error
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__" or names.is_ignorable(name):
            continue
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        if dtype not in _CODECS:
            raise ArtifactError(
                f"{path}: tensor {name} has storage type {dtype}; supported are {', '.join(_CODECS)}. "
                "Export from the original weights"
            )
        offset = 8 + length + entry["data_offsets"][0]
        tensors[name] = StoredTensor(TensorRange(name, path, offset, shape, _CODECS[dtype]), dtype)
    return tensors


def _other_weights(folder: ModelFolder) -> str:
    """Return what to do in a folder without safetensors files."""
    others = [path.name for path in folder.files(lambda name: name.endswith((".bin", ".pt", ".pth")))]
    if others:
        return f"found {', '.join(others[:4])}: {CONVERT_PICKLE}"
    return "expected a Hugging Face model folder or a GGUF file"
