"""What the process of a benchmark and the processes of its entries say to each other: a JSON document a line,
question and answer.

The child speaks first (:class:`Ready`), then answers each question with its own kind of answer or with
:class:`Failed`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from llorch_serve.artifact.manifest import KvDtype
from llorch_serve.bench.schema import Entry, FidelityResult, OfflineTest, Problem
from llorch_serve.config import DEFAULT_PREFILL_CHUNK, EngineConfig, SessionConfig, StageChoice
from llorch_serve.providers import ProviderChoice

PROTOCOL: Final = 4
"""Raised by every change of a message's fields: each end refuses fields that it does not know, and
:class:`Ready` alone, which stays as it is, says which llorch is older. 2: stages. 3: shared weights.
4: tokens of a prompt in a step.
"""


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; ``type`` is the class."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """:class:`llorch_serve.config.SessionConfig` as JSON can hold it.

    prefill_chunk: of the engine, most prompt tokens in one step.
    """

    prefill_chunk: int
    threads: int | None
    slots: int
    max_context: int | None
    kv_dtype: KvDtype | None
    single_graph: bool
    batch_invariant: bool
    huge_pages: bool | None
    share_weights: bool
    provider: str | None
    options: tuple[str, ...]
    library: str | None
    allow_cpu_nodes: bool
    stage_devices: tuple[int, ...]
    stage_processes: bool

    @staticmethod
    def of(config: SessionConfig, prefill_chunk: int = DEFAULT_PREFILL_CHUNK) -> Settings:
        """Return the settings of a configuration."""
        choice = config.provider
        return Settings(
            prefill_chunk=prefill_chunk,
            threads=config.threads,
            slots=config.slots,
            max_context=config.max_context,
            kv_dtype=config.kv_dtype,
            single_graph=config.single_graph,
            batch_invariant=config.batch_invariant,
            huge_pages=config.huge_pages,
            share_weights=config.share_weights,
            provider=choice.name,
            options=choice.options,
            library=None if choice.library is None else str(choice.library),
            allow_cpu_nodes=choice.allow_cpu_nodes,
            stage_devices=config.stages.devices,
            stage_processes=config.stages.processes,
        )

    def config(self) -> EngineConfig:
        """Return the configuration of an engine, all else as it is by default."""
        library = None if self.library is None else Path(self.library)
        session = SessionConfig(
            threads=self.threads,
            slots=self.slots,
            max_context=self.max_context,
            kv_dtype=self.kv_dtype,
            single_graph=self.single_graph,
            batch_invariant=self.batch_invariant,
            huge_pages=self.huge_pages,
            share_weights=self.share_weights,
            provider=ProviderChoice(self.provider, self.options, library, self.allow_cpu_nodes),
            stages=StageChoice(self.stage_devices, self.stage_processes),
        )
        return EngineConfig(session=session, prefill_chunk=self.prefill_chunk)


class Open(_Message, frozen=True, kw_only=True):
    """Load a model.

    label: the entry's. prompt_ids: the text of prompts; None: the sample text, as the model's tokenizer has
        it.
    longest: tokens of the longest sequence to come.
    """

    label: str
    folder: str
    tokenizer: str | None
    settings: Settings
    prompt_ids: tuple[int, ...] | None
    longest: int


class Run(_Message, frozen=True, kw_only=True):
    """Run a test once."""

    test: OfflineTest


class Close(_Message, frozen=True, kw_only=True):
    """Give the model's memory back."""


class Judge(_Message, frozen=True, kw_only=True):
    """Compare the model with a reference file, after :class:`Close`."""

    reference: str


Question = Open | Run | Close | Judge


class Ready(_Message, frozen=True, kw_only=True):
    """The child runs. protocol: :data:`PROTOCOL` of its llorch, whose version is beside it."""

    protocol: int
    version: str


class Opened(_Message, frozen=True, kw_only=True):
    """The model is loaded; all of the entry that is known by now."""

    entry: Entry


class Ran(_Message, frozen=True, kw_only=True):
    """Quantities of one run, by name."""

    values: dict[str, float]


class Closed(_Message, frozen=True, kw_only=True):
    """The most host memory that the process has held."""

    peak_rss_mib: float


class Judged(_Message, frozen=True, kw_only=True):
    """The divergence."""

    fidelity: FidelityResult


class Failed(_Message, frozen=True, kw_only=True):
    """The question could not be answered. goes_on: the next one can be, since only this test is beyond the
    engine.
    """

    problem: Problem
    goes_on: bool = False


Answer = Ready | Opened | Ran | Closed | Judged | Failed
