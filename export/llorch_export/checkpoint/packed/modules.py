"""The packed modules of a folder: parts gathered by module, and read by the format's own reader.

Input are the stored tensors by the model's own names; those that belong to packed modules are taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from llorch_export.checkpoint.names import HEAD
from llorch_export.checkpoint.packed.awq import AwqReader
from llorch_export.checkpoint.packed.base import PackedMatrix, PackedModule, PackedReader
from llorch_export.checkpoint.packed.bitsandbytes import BitsAndBytesReader
from llorch_export.checkpoint.packed.compressed import CompressedReader
from llorch_export.checkpoint.packed.gptq import GptqReader
from llorch_export.checkpoint.packed.hqq import HqqReader
from llorch_export.checkpoint.packed.modelopt import ModelOptReader
from llorch_export.checkpoint.packed.mxfp4 import Mxfp4Reader
from llorch_export.checkpoint.packed.quanto import QuantoReader
from llorch_export.checkpoint.packed.quark import QuarkReader
from llorch_export.checkpoint.packed.stored import StoredArray
from llorch_export.checkpoint.packed.torchao import TorchAoReader
from llorch_export.checkpoint.stored_tensors import StoredTensor
from llorch_export.checkpoint.stream import read_float32
from llorch_export.config.packed.awq import AwqPacking
from llorch_export.config.packed.base import Packing
from llorch_export.config.packed.bitsandbytes import BitsAndBytesPacking
from llorch_export.config.packed.compressed import CompressedPacking
from llorch_export.config.packed.gptq import GptqPacking
from llorch_export.config.packed.hqq import HqqPacking
from llorch_export.config.packed.modelopt import ModelOptPacking
from llorch_export.config.packed.mxfp4 import Mxfp4Packing
from llorch_export.config.packed.quanto import QuantoPacking
from llorch_export.config.packed.quark import QuarkPacking
from llorch_export.config.packed.torchao import TorchAoPacking
from llorch_serve.errors import ArtifactError

_WEIGHT: Final = ".weight"
_OF_STACKS: Final = (Mxfp4Reader,)
_READERS: Final[Mapping[type[Packing], Callable[[Any], PackedReader]]] = {
    GptqPacking: GptqReader,
    AwqPacking: AwqReader,
    CompressedPacking: CompressedReader,
    BitsAndBytesPacking: BitsAndBytesReader,
    TorchAoPacking: TorchAoReader,
    HqqPacking: HqqReader,
    ModelOptPacking: ModelOptReader,
    QuarkPacking: QuarkReader,
    Mxfp4Packing: Mxfp4Reader,
    QuantoPacking: QuantoReader,
}


def reader_of(packing: Packing) -> PackedReader:
    """Return what reads modules that are packed so."""
    return _READERS[type(packing)](packing)


def drop_unused(stored: dict[str, StoredTensor], packing: Packing) -> None:
    """Take out what no weight needs."""
    for name in [name for name in stored if name.endswith(packing.unused)]:
        del stored[name]


def take_packed(
    stored: dict[str, StoredTensor], wanted: Mapping[str, tuple[int, ...]], reader: PackedReader
) -> dict[str, PackedMatrix]:
    """Take the parts of packed modules out of ``stored``; return the weights by name.

    wanted: the tensors that the config calls for, with their shapes; matrices, and in some formats stacks of
        them, are packed.
    Raises ArtifactError if parts are missing or do not fit, or if a module is there packed and plain.
    """
    found: dict[str, PackedMatrix] = {}
    for name, shape in wanted.items():
        if len(shape) != 2 and not (len(shape) == 3 and isinstance(reader, _OF_STACKS)):
            continue
        module = name.removesuffix(_WEIGHT)
        parts = {
            suffix.removeprefix("."): StoredArray.at(tensor.source, tensor.dtype, tensor.notes)
            for suffix in reader.suffixes
            if (tensor := stored.get(f"{module}{suffix}")) is not None
        }
        if not parts:
            continue
        stack = shape[0] if len(shape) > 2 else None
        size = (shape[0] * shape[1], shape[2]) if len(shape) > 2 else (shape[0], shape[1])
        matrix = reader.read(PackedModule(module, size, parts, stack))
        if matrix is None:
            continue
        for suffix in reader.suffixes:
            stored.pop(f"{module}{suffix}", None)
        if name in stored:
            raise ArtifactError(
                f"{stored[name].source.path}: module {module} is there packed ({', '.join(sorted(parts))}) "
                "and plain (weight), and it is not known which is meant; remove one of them"
            )
        found[name] = matrix
        _drop_empty_bias(stored, f"{module}.bias", wanted)
    return found


def refuse_packed_head(stored: Collection[str], reader: PackedReader, origin: str) -> None:
    """Raise ArtifactError if there are parts of a packed head; ``stored`` are tensors of a model whose config
    ties its head to the embedding, so that it is not known which of both is meant.
    """
    head = HEAD.removesuffix(_WEIGHT)
    packed = {f"{head}{suffix}" for suffix in reader.suffixes if suffix != _WEIGHT}
    if parts := sorted(packed.intersection(stored)):
        raise ArtifactError(
            f"{origin}: config.json ties the head to the embedding, and the head is there packed besides "
            f"({', '.join(parts)}); set tie_word_embeddings to false if the head is meant, else remove these "
            "tensors"
        )


def _drop_empty_bias(
    stored: dict[str, StoredTensor], name: str, wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Take out zeros that a tool has added where the model has no bias; others stay, and are refused."""
    if name in stored and name not in wanted and not read_float32(stored[name].source).any():
        del stored[name]
