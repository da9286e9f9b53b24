"""Hugging Face folders as checkpoints.

Input is a :class:`ModelFolder`; output are lazy tensors out of its safetensors files. The safetensors library
checks each file's header (sizes, overlaps, holes); tensors are then read, not mapped, one piece at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llorch_export.checkpoint import names
from llorch_export.checkpoint.base import LazyTensor
from llorch_export.checkpoint.expert_names import names_in_use
from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.checkpoint.lazy_parts import arranged, packed_tensor, plain_tensor
from llorch_export.checkpoint.other_weights import NEVER_READ, advice, convert_pickle
from llorch_export.checkpoint.packed.base import PackedReader
from llorch_export.checkpoint.packed.modules import drop_unused, reader_of, refuse_packed_head, take_packed
from llorch_export.checkpoint.safetensors_file import CODECS, file_tensors, unsupported_type
from llorch_export.checkpoint.stored_names import SCALE_PARTS, is_value_head, module_name
from llorch_export.checkpoint.stored_tensors import StoredTensor, require_copy, settle_tied, take_scales
from llorch_export.config.families import FAMILIES
from llorch_export.config.fields import listed, quoted
from llorch_export.config.fp8 import Fp8Format
from llorch_export.config.packed.base import Packing
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_MAX_SHARDS: Final = 2**12
_OTHER_HEADS: Final = {"score.weight", "classifier.weight", "reward_head.weight"}
CONVERT_PICKLE: Final = (
    f"{NEVER_READ}; fetch the repository and give its folder: then the command that converts them is shown"
)


@dataclass(frozen=True, slots=True)
class FolderTensors:
    """The tensors of a folder.

    notices: what a person should know of how they were found, a line each.
    renamed: some have names that transformers does not know, so it cannot read the folder as it is.
    """

    tensors: Mapping[str, LazyTensor]
    notices: tuple[str, ...] = ()
    renamed: bool = False


def weight_files(folder: ModelFolder) -> tuple[Path, ...]:
    """Return the safetensors files that make up the model: the single file if there is one, else those of the
    index. So does transformers.

    Raises ArtifactError if there are none, or if one that the index names is missing or outside the folder.
    """
    single = folder.find(SINGLE)
    if single is not None:
        return (single,)
    index = _weight_map(folder)
    if index is None:
        raise ArtifactError(
            f"{folder.path} holds neither {SINGLE} nor {INDEX}; {advice(folder, single=SINGLE, index=INDEX)}"
        )
    shards = {name: folder.find(name) for name in sorted(set(index.values()))}
    missing = [name for name, path in shards.items() if path is None]
    if missing:
        raise ArtifactError(
            f"{folder.path} lacks {listed(missing)}, which {INDEX} names ({len(missing)} of "
            f"{len(shards)} shards); "
            "fetch the model again"
        )
    return tuple(path for path in shards.values() if path is not None)


def folder_tensors(
    folder: ModelFolder,
    config: LlamaConfig,
    packing: Packing | Fp8Format | None = None,
    *,
    headless: bool = False,
) -> FolderTensors:
    """Return exactly the tensors that ``config`` calls for.

    headless: leave out an output layer that the config does not call for.
    packing: how weights are packed, or fp8 weights are scaled; None: they stand for themselves.
    Raises ArtifactError naming files that are missing or damaged, and tensors that are missing, unused, there
    twice with different content, of a wrong shape or of an unsupported type.
    """
    index = _weight_map(folder)
    files = weight_files(folder)
    reader = reader_of(packing) if isinstance(packing, Packing) else None
    held = [file_tensors(path, folder, packed=reader is not None) for path in files]
    experts = names_in_use(config, (name for tensors in held for name in tensors))
    wanted = names.stored_tensors(config, experts)
    stored, left_out = _gathered(held, wanted, reader, config)
    if headless and names.EMBEDDING in stored:
        head = names.HEAD.removesuffix("weight")  # its parts too, where it is packed
        stored = {name: tensor for name, tensor in stored.items() if not name.startswith(head)}
    if isinstance(packing, Packing):
        drop_unused(stored, packing)
    packed = {} if reader is None else take_packed(stored, wanted, reader)
    _require_values(stored, wanted)
    _single_numbers(stored, wanted)
    if packing is not None and reader is None:
        take_scales(stored)
    renamed = bool(left_out.wrappers)
    if config.tie_word_embeddings:
        renamed |= names.EMBEDDING not in stored  # which transformers knows since 5
        if reader is not None:
            refuse_packed_head(stored, reader, str(folder.path))
        settle_tied(stored, str(folder.path), packed)
    found = {name: tensor.source.shape for name, tensor in stored.items()}
    found |= {name: wanted[name] for name in packed}
    missing = [name for name in wanted if name not in found]
    _explain_missing(missing, found, folder, index)
    names.check_tensors(wanted, found, origin=str(folder.path))
    places, expected = names.stored_places(config, experts), names.expected_tensors(config)
    tensors = {
        name: arranged(
            packed_tensor(name, expected[name], packed[place.name], place)
            if place.name in packed
            else plain_tensor(name, expected[name], stored[place.name], place, packing),
            config,
        )
        for name, place in places.items()
    }
    said = _said_of_packing(folder, packing, packed)
    return FolderTensors(tensors, (*_notices(folder, files, index, left_out), *said), renamed)


def _said_of_packing(
    folder: ModelFolder, packing: Packing | Fp8Format | None, packed: Collection[str]
) -> tuple[str, ...]:
    """Return what a person should know of packed weights, a line each."""
    if not isinstance(packing, Packing):
        return ()
    if packed:
        return packing.notices
    # Training leaves the settings of its base model behind, and merges into plain weights.
    return (
        f"the settings in {folder.path} say that weights are packed, and none is; they are read as they are",
    )


def _require_values(stored: Mapping[str, StoredTensor], wanted: Collection[str]) -> None:
    """Raise ArtifactError if a tensor that is used as it is has a type that holds no weights."""
    for name, tensor in stored.items():
        if name in wanted and tensor.dtype not in CODECS:
            raise unsupported_type(tensor.source.path, name, tensor.dtype)


def _single_numbers(stored: dict[str, StoredTensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Give single numbers that are stored without a dimension the one that the config calls for."""
    for name, tensor in stored.items():
        if wanted.get(name) == (1,) and tensor.source.shape == ():
            stored[name] = dataclasses.replace(tensor, source=dataclasses.replace(tensor.source, shape=(1,)))


@dataclass(slots=True)
class _LeftOut:
    """What reading the names of tensors left out: parts of names, and heads that are not the model's own."""

    wrappers: set[str] = dataclasses.field(default_factory=set)
    value_heads: list[str] = dataclasses.field(default_factory=list)


def _gathered(
    held: Iterable[Mapping[str, StoredTensor]],
    wanted: Collection[str],
    reader: PackedReader | None,
    config: LlamaConfig,
) -> tuple[dict[str, StoredTensor], _LeftOut]:
    """Return every tensor of the files by the model's own name for it, and what was left out.

    reader: of modules that are packed, if there may be any.
    """
    family = FAMILIES[config.architecture]
    stored: dict[str, StoredTensor] = {}
    left_out = _LeftOut()
    for tensors in held:
        for own_name, tensor in tensors.items():
            if is_value_head(own_name):
                left_out.value_heads.append(own_name)
                continue
            parts = SCALE_PARTS if reader is None else reader.suffixes
            found = module_name(names.loaded_name(own_name, family), wanted, parts)
            if found.wrapper:
                left_out.wrappers.add(found.wrapper)
            if found.name in stored:
                require_copy(found.name, stored[found.name], tensor)
            else:
                stored[found.name] = tensor
    return stored, left_out


def _explain_missing(
    missing: list[str],
    found: Collection[str],
    folder: ModelFolder,
    index: Mapping[str, str] | None,
) -> None:
    """Raise ArtifactError where more can be said of missing tensors than that they are missing."""
    for name in missing:
        if index is None or name not in index:
            continue
        if folder.find(SINGLE) is not None:
            raise ArtifactError(
                f"{folder.path / SINGLE} lacks tensor {name}, and goes before {INDEX}, which says that "
                f"{index[name]} has it; remove {SINGLE} if the shards are meant"
            )
        raise ArtifactError(
            f"{folder.path / index[name]} lacks tensor {name}, which {INDEX} says it holds; fetch the model "
            f"again"
        )
    scoring = sorted(_OTHER_HEADS & set(found))
    if scoring and names.HEAD not in found:
        raise ArtifactError(
            f"{folder.path} has no {names.HEAD} but {', '.join(scoring)}: it is a classification or reward "
            "model; expected a model that writes text"
        )
    if missing == [names.HEAD]:
        raise ArtifactError(
            f"{folder.path} has no {names.HEAD}, and its config does not tie the head to the embedding; if "
            "the head is the embedding set tie_word_embeddings to true, else fetch the model again"
        )


def _notices(
    folder: ModelFolder, files: tuple[Path, ...], index: Mapping[str, str] | None, left_out: _LeftOut
) -> tuple[str, ...]:
    found = []
    unread = sorted(set((index or {}).values()) - {path.name for path in files})
    if unread:
        found.append(
            f"{folder.path} holds {SINGLE} and {INDEX}; the single file is read, as transformers does, and "
            f"{_listed(unread)} {'is' if len(unread) == 1 else 'are'} not"
        )
    if left_out.wrappers:
        parts = ", ".join(sorted(left_out.wrappers)[:4])
        found.append(
            f"tensors of {folder.path} were saved with {parts} in their names, which training leaves there; "
            "they are read without"
        )
    if left_out.value_heads:
        found.append(
            f"{_listed(sorted(left_out.value_heads))} of {folder.path} belong to a head that training put "
            "beside the model's own; they are left out, as transformers does"
        )
    return tuple(found)


def _listed(names_of_strangers: Sequence[str]) -> str:
    """Return some names, of bounded length and without control characters."""
    return ", ".join(repr(name[:80]) for name in names_of_strangers[:4])


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
    files = set(weight_map.values())
    if len(files) > _MAX_SHARDS:
        raise ArtifactError(
            f"{folder.path / INDEX} names {len(files)} files, expected at most {_MAX_SHARDS}; fetch it again"
        )
    for name in files:
        if not name.endswith(".safetensors"):
            raise ArtifactError(
                f"{folder.path / INDEX} names the file {quoted(name)}, expected only .safetensors files; "
                f"{convert_pickle(folder.path)}"
            )
    return weight_map
