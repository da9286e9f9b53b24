"""What the process of a worker and the process of a stage tell each other about loading, as JSON.

The worker asks for room, then for loading, and closes its end when it has ended; the stage answers each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec

from llorch_serve.artifact.manifest import KvDtype
from llorch_serve.artifact.stages import load_stage
from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError, LlorchError, ProviderError, ResourceError, UsageError
from llorch_serve.providers import Placement, ProviderChoice
from llorch_serve.stages.loading import StageRoom, StageSettings
from llorch_serve.stages.stage import StageFacts


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    pass


class Open(_Message, frozen=True, kw_only=True):
    """Asks for room. The fields are those of :class:`llorch_serve.stages.loading.StageSettings`, and of the
    :class:`llorch_serve.config.SessionConfig` in it as far as a stage reads it.

    cores: the process runs on these alone; empty: on any. memories: descriptors of memory that the logits of
        each lane are written to; empty: there is none.
    """

    folder: str
    number: Annotated[int, msgspec.Meta(ge=0)]
    threads: Annotated[int, msgspec.Meta(ge=1)]
    cores: tuple[int, ...]
    memories: tuple[int, ...]
    kv_dtype: KvDtype | None
    single_graph: bool
    batch_invariant: bool
    huge_pages: bool | None
    provider: str | None
    provider_options: tuple[str, ...]
    library: str | None
    allow_cpu_nodes: bool


class Load(_Message, frozen=True, kw_only=True):
    """Asks for loading. lanes: what each may hold."""

    lanes: tuple[KvCapacity, ...]


class Room(_Message, frozen=True, kw_only=True):
    """Answers :class:`Open`."""

    room: StageRoom


class Loaded(_Message, frozen=True, kw_only=True):
    """Answers :class:`Load`: the fields of :class:`llorch_serve.stages.stage.StageFacts`."""

    where: Placement
    batched: bool
    max_rows: int | None
    needs_one_logits_row: bool

    @property
    def facts(self) -> StageFacts:
        """What a lane must know."""
        return StageFacts(self.where, self.batched, self.max_rows, self.needs_one_logits_row)


class Refused(_Message, frozen=True, kw_only=True):
    """Answers that it cannot be done. kind: the error's class."""

    kind: str
    message: str


Question: TypeAlias = Open | Load
Answer: TypeAlias = Room | Loaded | Refused
A = TypeVar("A", Room, Loaded)
_encoder: Final = msgspec.json.Encoder()
_questions: Final = msgspec.json.Decoder(Question)
_answers: Final = msgspec.json.Decoder(Answer)
_KINDS: Final = {kind.__name__: kind for kind in (UsageError, ArtifactError, ProviderError, ResourceError)}


def write(message: Question | Answer) -> bytes:
    """Return a message's bytes."""
    return _encoder.encode(message)


def read_question(message: memoryview) -> Question:
    """Return what is asked. Raises msgspec.MsgspecError."""
    found: Question = _questions.decode(message)
    return found


def read_answer(message: memoryview, kind: type[A]) -> A:
    """Return what is answered, which is of this kind. Raises what the answer refuses with,
    msgspec.MsgspecError.
    """
    answer: Answer = _answers.decode(message)
    if isinstance(answer, Refused):
        raise error_of(answer)
    assert isinstance(answer, kind), "a stage answers what it is asked"
    return answer


def ask_room(settings: StageSettings, cores: tuple[int, ...], memories: tuple[int, ...]) -> Open:
    """Return the question with which a stage's process begins."""
    config = settings.config
    choice = config.provider
    return Open(
        folder=str(settings.artifact.folder.absolute()),
        number=settings.number,
        threads=settings.threads,
        cores=cores,
        memories=memories,
        kv_dtype=config.kv_dtype,
        single_graph=config.single_graph,
        batch_invariant=config.batch_invariant,
        huge_pages=config.huge_pages,
        provider=choice.name,
        provider_options=choice.options,
        library=None if choice.library is None else str(choice.library.absolute()),
        allow_cpu_nodes=choice.allow_cpu_nodes,
    )


def asked_settings(ask: Open) -> StageSettings:
    """Return the settings that are asked for. Raises ArtifactError if the folder holds no artifact now."""
    config = SessionConfig(
        kv_dtype=ask.kv_dtype,
        single_graph=ask.single_graph,
        batch_invariant=ask.batch_invariant,
        huge_pages=ask.huge_pages,
        provider=ProviderChoice(
            ask.provider,
            ask.provider_options,
            None if ask.library is None else Path(ask.library),
            ask.allow_cpu_nodes,
        ),
    )
    return StageSettings(
        load_stage(Path(ask.folder), ask.number), ask.number, config, ask.threads, gather=True
    )


def loaded(facts: StageFacts) -> Loaded:
    """Return the answer that a stage is loaded."""
    return Loaded(
        where=facts.where,
        batched=facts.batched,
        max_rows=facts.max_rows,
        needs_one_logits_row=facts.needs_one_logits_row,
    )


def refused(error: Exception) -> Refused:
    """Return the answer to what failed."""
    kind = next((name for name, made in _KINDS.items() if isinstance(error, made)), "")
    if isinstance(error, MemoryError):
        kind, error = "ResourceError", ResourceError("memory does not suffice for the stage")
    said = str(error) if isinstance(error, LlorchError) else f"{type(error).__name__}: {error}"
    return Refused(kind=kind, message=said[:4000])


def error_of(answer: Refused) -> Exception:
    """Return the error that an answer tells of."""
    return _KINDS.get(answer.kind, RuntimeError)(answer.message)
