"""Embedding and head under adapters: whether the two stay one table, and how many tokens they have.

An adapter that was trained on one of two tied tables changed that one alone, as PEFT computes it; such a
model has two tables from then on. PEFT's own merge_and_unload would change both. What replaces a whole table
may have another number of rows, where the vocabulary was resized for the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from llorch_export.adapter.merge import Change
from llorch_export.adapter.modules import TABLES
from llorch_export.adapter.settings import AdapterSettings
from llorch_export.checkpoint.names import EMBEDDING, HEAD
from llorch_export.checkpoint.stream import TensorRange, read_float32, same_bytes
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError

_MAX_ROWS: Final = 2**22
UNTIED: Final = (
    "the adapter changes one of the embedding and the head, which the base model shares, so the two are "
    "stored apart (PEFT's merge_and_unload would change both)"
)


@dataclass(frozen=True, slots=True)
class TableChanges:
    """What one adapter does to a model's two tables.

    shared: it is one change of a tied table, which stands under the embedding's name. Only where the base
    model ties them.
    """

    changes: Mapping[str, Change]
    shared: bool


def table_changes(
    changes: Mapping[str, Change], settings: AdapterSettings, base: LlamaConfig
) -> TableChanges:
    """Sort out an adapter's changes of embedding and head.

    Raises ArtifactError if its config says that the two are tied, and its file that they are not.
    """
    own = {name: changes[name] for name in TABLES if name in changes}
    if not own or not base.tie_word_embeddings:
        return TableChanges(own, shared=False)
    embedding, head = own.get(EMBEDDING), own.get(HEAD)
    if settings.ties:
        if embedding is not None and head is not None and not _same(embedding, head):
            raise ArtifactError(
                f"{settings.origin}: ensure_weight_tying is true, and the file changes embedding and head "
                f"differently; save the adapter again"
            )
        return TableChanges({EMBEDDING: next(iter(own.values()))}, shared=True)
    if embedding is None or head is None:
        only, other = (embedding, HEAD) if head is None else (head, EMBEDDING)
        assert only is not None
        if only.products and only.replaced is not None:  # the table that the factors are for, still shared
            return TableChanges({**own, other: Change(replaced=only.replaced)}, shared=False)
    if head is None:
        assert embedding is not None
        only_tokens = embedding == Change(tokens=embedding.tokens)
        resized = embedding.replaced is not None and embedding.replaced.shape[0] != base.vocab_size
        return TableChanges(own, shared=only_tokens or resized)
    if embedding is not None and embedding.tokens is not None and head.tokens is None:
        raise ArtifactError(
            f"{settings.origin}: trainable_token_indices of tied tables changes both, and the head is "
            f"adapted otherwise too, which is not known to be merged right; leave the head out of the adapter"
        )
    if embedding is not None and _is_whole(embedding) and _is_whole(head) and _same(embedding, head):
        return TableChanges({EMBEDDING: embedding}, shared=True)
    return TableChanges(own, shared=False)


def _is_whole(change: Change) -> bool:
    """Tell whether a change gives a whole table, and adds nothing to it."""
    return change.replaced is not None and change == Change(replaced=change.replaced, tokens=change.tokens)


def _same(embedding: Change, head: Change) -> bool:
    """Tell whether a head's change is the embedding's: the same rows, and transposed factors."""
    if not _same_values(embedding.replaced, head.replaced):
        return False
    mine, other = embedding.tokens, head.tokens
    if (mine is None) is not (other is None):
        return False
    if mine is not None and other is not None:
        return mine.ids == other.ids and _same_values(mine.values, other.values)
    if len(embedding.products) != len(head.products):
        return False
    return all(
        np.array_equal(read_float32(mine.a).T, read_float32(other.b))
        and np.array_equal(read_float32(mine.b).T, read_float32(other.a))
        for mine, other in zip(embedding.products, head.products, strict=True)
    )


def _same_values(left: TensorRange | None, right: TensorRange | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.codec is right.codec and same_bytes(left, right)


def settle_tables(
    found: Sequence[TableChanges], base: LlamaConfig
) -> tuple[LlamaConfig, list[Mapping[str, Change]]]:
    """Return the config with ties and vocabulary as the adapters leave them, and the changes of each."""
    untied = base.tie_word_embeddings and any(one.changes and not one.shared for one in found)
    changes = [
        {**one.changes, HEAD: one.changes[EMBEDDING]} if untied and one.shared else one.changes
        for one in found
    ]
    config = msgspec.structs.replace(base, tie_word_embeddings=base.tie_word_embeddings and not untied)
    return _resized(config, changes), changes


def _resized(config: LlamaConfig, changes: Sequence[Mapping[str, Change]]) -> LlamaConfig:
    """Return the config with the number of rows that all tables have. Raises ArtifactError if they differ."""
    rows = dict.fromkeys(TABLES[: 1 if config.tie_word_embeddings else 2], config.vocab_size)
    path = None
    for one in changes:
        for name, change in one.items():
            if change.replaced is not None:
                rows[name] = change.replaced.shape[0]
                path = change.replaced.path
    if len(set(rows.values())) > 1:
        listed = " and ".join(f"{name} {count}" for name, count in rows.items())
        raise ArtifactError(
            f"{path} resizes one table alone: {listed} rows, expected the same number of both; save the "
            f"adapter with save_embedding_layers=True"
        )
    if not 0 < rows[EMBEDDING] <= _MAX_ROWS:
        raise ArtifactError(f"{path} has tables of {rows[EMBEDDING]} rows, expected 1 to {_MAX_ROWS}")
    return msgspec.structs.replace(config, vocab_size=rows[EMBEDDING])
