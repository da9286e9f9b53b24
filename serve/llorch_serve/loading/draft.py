"""A draft model beside the one that is served: checked, given its part of the memory, and opened.

Input: the folder that ``--draft`` names, and the model whose answers it guesses. Output: a session with as
many slots, for :class:`llorch_serve.engine.drafter.Drafter`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.kinds import ModelKind
from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.foreign.model import ForeignModel
from llorch_serve.loading.models import load_model, open_model
from llorch_serve.runtime.graph_choice import GraphChoice, choose_graphs
from llorch_serve.runtime.memory_plan import Beside
from llorch_serve.runtime.opening import LoadReport
from llorch_serve.runtime.session import DecoderSession
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.served import ServedDraft


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft that has been checked and not loaded. graphs: what will be loaded of it."""

    artifact: Artifact
    config: SessionConfig
    graphs: GraphChoice

    @property
    def beside(self) -> Beside:
        """What it takes of the memory that it shares with the model."""
        return Beside(self.artifact.manifest, self.graphs)

    def open(self, room: KvCapacity, report: Callable[[LoadReport], None]) -> ServedDraft:
        """Load it, with the slots of the model and a cache for as many tokens. room: the model's own.

        Raises as :func:`llorch_serve.loading.models.open_model` does.
        """
        context = min(room.context, self.artifact.manifest.context_length)
        config = replace(
            self.config,
            slots=room.slots,
            max_context=context,
            kv_cache_bytes=self.graphs.kv.bytes_per_token * max(room.budget, context),
        )

        def told(loaded: LoadReport) -> None:
            # How slots share the cache has been said of the model.
            if loaded.notice not in (None, loaded.capacity.notice(context)):
                report(replace(loaded, notice=f"the draft: {loaded.notice}"))

        session = open_model(self.artifact, config, told)
        assert isinstance(session, DecoderSession)  # as every artifact that was not refused has
        return session


def find_draft(
    folder: Path, model: Artifact | ForeignModel, tokenizer: Path | None, config: SessionConfig
) -> DraftModel:
    """Return the draft of a folder. tokenizer: that the model has instead of its folder's own; None: it has
    not.

    Raises UsageError for a model or a folder that drafts do not go with, and ArtifactError for a folder that
    is damaged or holds another tokenizer.
    """
    if not isinstance(model, Artifact) or model.kind is not ModelKind.LLORCH:
        raise UsageError(
            f"--draft is for an artifact of llorch's own and {model.folder} was made by {model.kind.value}; "
            "leave it out"
        )
    if model.manifest.stages:
        raise UsageError(
            f"--draft is for a model that is one graph and {model.folder} is cut into "
            f"{len(model.manifest.stages)} stages; leave it out"
        )
    draft = load_model(folder)
    if (found := _unfit(draft)) is not None:
        raise UsageError(
            f"--draft is {folder}, which {found}; expected an artifact of llorch's own that generates text, "
            "as one graph of any shape. Export a smaller model of the same tokenizer, or leave it out"
        )
    assert isinstance(draft, Artifact)
    _check_tokens(draft, tokenizer or model.tokenizer_path)
    # A cache of another type would be the draft's own affair: the model's type may be one that it has not.
    own = replace(config, kv_dtype=None, single_graph=config.single_graph and _has_choice(draft))
    return DraftModel(draft, own, choose_graphs(draft.manifest, own))


def _unfit(draft: Artifact | ForeignModel) -> str | None:
    """Say why a folder cannot guess; None if it can."""
    if not isinstance(draft, Artifact) or draft.kind is not ModelKind.LLORCH:
        return f"was made by {draft.kind.value}"
    if draft.manifest.embeds is not None:
        return "holds a graph that embeds texts"
    if draft.manifest.stages:
        return f"is cut into {len(draft.manifest.stages)} stages"
    if draft.manifest.fixed_shapes is not None or not draft.manifest.chunked_prefill:
        return f"is for the target {draft.manifest.target}, which takes no part of a sequence"
    return None


def _has_choice(draft: Artifact) -> bool:
    """Tell whether prompts may run on another graph than answers do."""
    return draft.manifest.prompts is not None or draft.manifest.kv_dtypes[0] == "int8"


def _check_tokens(draft: Artifact, tokenizer: Path) -> None:
    """Raise ArtifactError unless every id stands for the same token. tokenizer: the model's."""
    if draft.tokenizer_path.read_bytes() == tokenizer.read_bytes():
        return
    theirs, ours = (Tokenizer.load(path).vocabulary() for path in (draft.tokenizer_path, tokenizer))
    if theirs == ours:
        return
    different = sorted(set(theirs.items()) ^ set(ours.items()), key=lambda item: (item[1], item[0]))
    (token, id_), count = different[0], len({number for _, number in different})
    raise ArtifactError(
        f"{draft.tokenizer_path} has {len(theirs)} tokens and {tokenizer} has {len(ours)}; {count} ids stand "
        f"for different ones, the first of them {id_} ({token[:40]!r} in one of the two). --draft expects an "
        "artifact of the same tokenizer; export a smaller model of the same family, or leave it out"
    )
