"""Adapters onto a checkpoint: ``llorch export --lora``.

Takes a checkpoint and the folders of adapters; gives the checkpoint with lazy tensors that are merged as they
are read, and with the tokenizer and chat template of an adapter that brings its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from llorch_export.adapter.changes import changes_of
from llorch_export.adapter.choice import AdapterChoice
from llorch_export.adapter.files import AdapterFiles, read_files
from llorch_export.adapter.merge import Change, changed
from llorch_export.adapter.modules import ModelModules
from llorch_export.adapter.parts import sort_parts
from llorch_export.adapter.settings import AdapterSettings, base_model_notice, read_settings
from llorch_export.adapter.tables import UNTIED, settle_tables, table_changes
from llorch_export.adapter.text import adapted_text, check_covered
from llorch_export.checkpoint.base import Adapter, Checkpoint, LazyTensor
from llorch_export.checkpoint.names import EMBEDDING, HEAD, expected_tensors
from llorch_export.checkpoint.row_order import in_order, row_order
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError

_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: Final = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Adapted:
    """A model with adapters. config: the base model's, but for ties, vocabulary and biases that they change.

    adapters: with their files and notices, in the order they were named.
    """

    config: LlamaConfig
    tensors: Mapping[str, LazyTensor]
    adapters: tuple[Adapter, ...]


@dataclass(frozen=True, slots=True)
class _Read:
    choice: AdapterChoice
    files: AdapterFiles
    settings: AdapterSettings
    changes: Mapping[str, Change]
    notices: tuple[str, ...]


def with_adapters(checkpoint: Checkpoint, choices: Sequence[AdapterChoice]) -> Checkpoint:
    """Return the checkpoint with adapters merged into its tensors.

    Raises ArtifactError if one is no such adapter, does not fit the checkpoint, or holds more than can be
    merged.
    """
    if not choices:
        return checkpoint
    adapted = adapt(checkpoint.config, checkpoint.tensors, choices, source=checkpoint.name)
    tokenizer, adapters = adapted_text(checkpoint.tokenizer, adapted.adapters, adapted.config.vocab_size)
    if adapted.config.vocab_size < checkpoint.config.vocab_size:
        check_covered(tokenizer, adapted.config.vocab_size, checkpoint.path)
    return dataclasses.replace(
        checkpoint,
        config=adapted.config,
        base_config=checkpoint.config,
        tensors=adapted.tensors,
        tokenizer=tokenizer,
        adapters=adapters,
    )


def adapter_notices(adapters: Sequence[Adapter]) -> tuple[str, ...]:
    """Return what a person should know about adapters, a line each."""
    return tuple(f"adapter {one.name}: {notice}" for one in adapters for notice in one.notices)


def adapt(
    config: LlamaConfig, tensors: Mapping[str, LazyTensor], choices: Sequence[AdapterChoice], *, source: str
) -> Adapted:
    """Return a model with the adapters in ``choices``; ``source`` is its name, for notices. No tensor is read
    but for comparing tied ones.

    Raises ArtifactError as :func:`with_adapters` does.
    """
    model = ModelModules(config, {name: tensor.shape for name, tensor in tensors.items()})
    read = [_read(choice, config, model, source) for choice in choices]
    tables = [table_changes(one.changes, one.settings, config) for one in read]
    settled, of_tables = settle_tables(tables, config)
    changes: dict[str, Change] = {}
    for one, own in zip(read, of_tables, strict=True):
        rest = {name: change for name, change in one.changes.items() if name not in (EMBEDDING, HEAD)}
        for name, change in {**rest, **own}.items():
            changes[name] = _combined(changes.get(name), _weighted(change, name, one), name)
    settled = _with_biases(settled, changes)
    untied = settled.tie_word_embeddings is not config.tie_word_embeddings
    adapters = tuple(
        Adapter(
            path=one.choice.path,
            name=one.choice.name,
            content_files=one.files.content,
            weight=one.choice.weight,
            notices=(*one.notices, *([UNTIED] if untied and table.changes and not table.shared else [])),
        )
        for one, table in zip(read, tables, strict=True)
    )
    return Adapted(settled, _merged(settled, tensors, changes), adapters)


def _read(choice: AdapterChoice, config: LlamaConfig, model: ModelModules, source: str) -> _Read:
    files = read_files(choice.path)
    settings = read_settings(files.config, origin=files.origin, base=config)
    parts = sort_parts(files.tensors)
    changes = changes_of(files, settings, parts.modules, model)
    notices = [*settings.notices]
    if (other := base_model_notice(settings, source)) is not None:
        notices.append(other)
    if parts.copies:
        notices.append(
            f"{len(parts.copies)} tensors that repeat others, or the base model's, are ignored as PEFT does: "
            f"{', '.join(parts.copies[:4])}"
        )
    if settings.biases != "none" and not any(name.endswith(".bias") for name in changes):
        notices.append("bias says that biases were trained, and the modules that it means have none")
    return _Read(choice, files, settings, changes, tuple(notices))


def _weighted(change: Change, name: str, read: _Read) -> Change:
    if read.choice.weight == 1:
        return change
    if not change.only_adds:
        raise ArtifactError(
            f"{read.choice.path} replaces or rescales {name}, which cannot be done "
            f"{read.choice.weight:g} times; give it no weight"
        )
    return change.weighted(read.choice.weight)


def _combined(first: Change | None, second: Change, name: str) -> Change:
    if first is None:
        return second
    rescaled = first.magnitude is not None or second.magnitude is not None
    if first.tokens is not None or second.tokens is not None:
        raise ArtifactError(
            f"two adapters change {name}, and trainable_token_indices of one settles rows of it, to which "
            f"nothing can be added; merge one of them alone"
        )
    if rescaled or not (first.only_adds or second.only_adds):
        raise ArtifactError(
            f"two adapters change {name}, and {'use_dora of one' if rescaled else 'each of them'} settles "
            f"all of it; merge one of them alone"
        )
    return first.followed_by(second)


def _with_biases(config: LlamaConfig, changes: Mapping[str, Change]) -> LlamaConfig:
    """Return the config with the biases that adapters add; those of modules without one are zero."""
    known = expected_tensors(config)
    added = [name for name in changes if name.endswith(".bias") and name not in known]
    modules = {name.removesuffix(".bias").rpartition(".")[2] for name in added}
    attention, mlp = modules.intersection(_ATTENTION), modules.intersection(_MLP)
    if attention:
        key = "attention_bias" if "o_proj" in attention or config.attention_bias else "qkv_bias"
        config = msgspec.structs.replace(config, **{key: True})
    if mlp:
        config = msgspec.structs.replace(config, mlp_bias=True)
    left = sorted(changes.keys() - expected_tensors(config).keys())
    if left:
        raise ArtifactError(
            f"the adapter has {left[0]} for a module that can have no bias; use an adapter without lora_bias"
        )
    return config


def _merged(
    config: LlamaConfig, tensors: Mapping[str, LazyTensor], changes: Mapping[str, Change]
) -> dict[str, LazyTensor]:
    """Return all tensors of the adapted model."""
    result = {}
    for name, shape in expected_tensors(config).items():
        tensor = tensors.get(name)
        if tensor is None:
            tensor = (
                dataclasses.replace(tensors[EMBEDDING], name=HEAD)
                if name == HEAD
                else LazyTensor(name, shape, "F32", lambda start, stop: _zeros(stop - start))
            )
        result[name] = _changed(tensor, changes[name], config) if name in changes else tensor
        assert result[name].shape == shape, (name, result[name].shape, shape)
    return result


def _changed(tensor: LazyTensor, change: Change, config: LlamaConfig) -> LazyTensor:
    """Return the tensor with the change, which has the rows in the order that the family stores them in."""
    order = row_order(tensor.name, config)
    if order is None:
        return changed(tensor, change)
    stored = dataclasses.replace(tensor, load_rows=in_order(tensor.load_rows, np.argsort(order)))
    found = changed(stored, change)
    return dataclasses.replace(found, load_rows=in_order(found.load_rows, order))


def _zeros(count: int) -> npt.NDArray[np.float32]:
    return np.zeros(count, np.float32)
