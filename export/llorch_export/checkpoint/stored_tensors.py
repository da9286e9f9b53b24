"""Tensors of safetensors files that are there twice, belong to each other, or stand for each other.

Input are the places of tensors by the model's own names; what is changed is which of them count. Nothing is
dropped unless its content is compared: a copy that differs would be another model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from llorch_export.checkpoint.base import CHUNK_ELEMENTS
from llorch_export.checkpoint.fp8 import ACTIVATION_SCALES, FP8_CODECS, SCALES, WEIGHT
from llorch_export.checkpoint.names import EMBEDDING, HEAD
from llorch_export.checkpoint.stream import TensorRange, read_rows, same_bytes
from llorch_export.config.fields import shown
from llorch_serve.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place, its type's name, and the place of the scale that fp8 weights may have.

    notes: what its file's header says beside tensors.
    """

    source: TensorRange
    dtype: str
    scale: TensorRange | None = None
    notes: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


def require_copy(name: str, first: StoredTensor, second: StoredTensor) -> None:
    """Raise ArtifactError unless two tensors of one name have the same content."""
    if not same_content(first, second):
        raise ArtifactError(
            f"{second.source.path} and {first.source.path.name} both hold tensor {name}, and they differ; "
            "remove the file, or the tensor, that is not part of the model"
        )


def same_content(first: StoredTensor, second: StoredTensor) -> bool:
    """Tell whether two tensors have equal shapes and values. Raises ArtifactError if unreadable."""
    left, right = first.source, second.source
    if left.shape != right.shape:
        return False
    if first.dtype == second.dtype:
        return same_bytes(left, right)
    rows = left.shape[0] if left.shape else 0
    step = max(1, CHUNK_ELEMENTS * rows // max(1, left.elements))
    starts = range(0, rows, step)
    return rows > 0 and all(
        np.array_equal(read_rows(left, s, min(s + step, rows)), read_rows(right, s, min(s + step, rows)))
        for s in starts
    )


def take_scales(stored: dict[str, StoredTensor]) -> None:
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
                f"{tensor.source.path}: tensor {shown(name)} of type {tensor.dtype} has {len(scales)} scales "
                f"and {len(tensor.source.shape)} dimensions, expected a matrix with one of "
                f"{' or '.join(SCALES)}; "
                "fetch the model again"
            )
        stored[name] = dataclasses.replace(tensor, scale=scales[0].source)
        for suffix in ACTIVATION_SCALES:
            stored.pop(f"{module}{suffix}", None)


def settle_tied(stored: dict[str, StoredTensor], origin: str, packed: Collection[str] = ()) -> None:
    """Leave one table where the config ties head and embedding, called the embedding.

    A file may hold either of them, or both alike. packed: weights that are there in another form.
    Raises ArtifactError if both differ.
    """
    head, embedding = stored.get(HEAD), stored.get(EMBEDDING)
    if head is None or EMBEDDING in packed:
        return
    if embedding is not None and (head.scale or embedding.scale or not same_content(head, embedding)):
        raise ArtifactError(
            f"{origin}: config.json ties the head to the embedding, but {HEAD} differs from {EMBEDDING}; "
            "transformers before 5 leaves that head out, and since 5 it keeps it, so say which is meant: set "
            f"tie_word_embeddings to false to keep it, or remove the tensor {HEAD}"
        )
    if embedding is None:
        stored[EMBEDDING] = head
    del stored[HEAD]
