"""Flags that say how a model runs in this process, and the configuration that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llorch_serve.artifact.manifest import KvDtype
from llorch_serve.config import (
    AUTO,
    DEFAULT_PREFILL_CHUNK,
    EngineConfig,
    SessionConfig,
    StageChoice,
    check_guesses,
    read_size,
)
from llorch_serve.errors import UsageError
from llorch_serve.providers import ProviderChoice
from llorch_serve.providers.table import names
from llorch_serve.terminal.groups import FlagGroup

EpLibrary = Annotated[
    Path | None,
    typer.Option("--ep-library", metavar="PATH", help="A provider's plugin library.", show_default=False),
]
AllowCpuNodes = Annotated[
    bool,
    typer.Option(
        "--allow-cpu-nodes/--no-allow-cpu-nodes",
        help="Nodes that the provider does not take may run on the CPU; else refuse.",
    ),
]
HugePages = Annotated[
    bool | None,
    typer.Option(
        "--huge-pages/--no-huge-pages",
        help="Move the loaded weights into huge pages: faster, after a load that takes longer. Default: "
        "where the system can (Linux 6.1).",
        show_default=False,
    ),
]


ShareWeights = Annotated[
    bool,
    typer.Option(
        "--share-weights/--no-share-weights",
        help="Map packed weights from a file in the user's cache, made if it is not there: several workers "
        "of a machine hold them once.",
    ),
]


class ProviderFlags(FlagGroup, frozen=True):
    """What runs the graph, and with how many threads."""

    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: all CPUs allowed.", show_default=False)
    ] = None
    provider: Annotated[
        str | None,
        typer.Option(
            "--provider",
            metavar="NAME",
            help=f"What runs the graph: {', '.join(names())}. Default: cpu.",
            show_default=False,
        ),
    ] = None
    provider_option: Annotated[
        list[str] | None,
        typer.Option(
            "--provider-option",
            metavar="KEY=VALUE",
            help="An option of the provider; may be repeated.",
            show_default=False,
        ),
    ] = None
    ep_library: EpLibrary = None
    allow_cpu_nodes: AllowCpuNodes = False

    def choice(self) -> ProviderChoice:
        """Return what the flags ask for together."""
        options = tuple(self.provider_option or ())
        return ProviderChoice(self.provider, options, self.ep_library, self.allow_cpu_nodes)


class SessionFlags(FlagGroup, frozen=True):
    """The KV cache and the graphs that are loaded."""

    max_context: Annotated[
        int | None,
        typer.Option(
            help="Tokens per sequence. Default: the model's, or less if memory is short.",
            show_default=False,
        ),
    ] = None
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for the KV cache, like 2GiB or 500MiB. Default: most of what is free.",
            show_default=False,
        ),
    ] = None
    kv_dtype: Annotated[
        KvDtype | None,
        typer.Option(
            "--kv-dtype",
            help="What the KV cache holds; int8 takes a quarter of float32's memory. Default: int8 if the "
            "artifact has a graph for it.",
            show_default=False,
        ),
    ] = None
    single_graph: Annotated[
        bool,
        typer.Option(
            "--single-graph/--no-single-graph",
            help="Run prompts on the graph that decodes too: slower, without the memory of a second one.",
        ),
    ] = False
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant/--no-batch-invariant",
            help="Run 4-bit weights on even numbers of rows, so that an answer is the same bits whatever "
            "else is running.",
        ),
    ] = False
    stage_device: Annotated[
        str | None,
        typer.Option(
            "--stage-device",
            metavar="0,1",
            help="The device of each stage, where the model is cut into stages (llorch export --stages) and "
            "the provider has several.",
            show_default=False,
        ),
    ] = None
    stage_processes: Annotated[
        bool,
        typer.Option(
            "--stage-processes/--no-stage-processes",
            help="Run each stage in a process of its own, with its share of the cores.",
        ),
    ] = False

    def config(
        self,
        provider: ProviderFlags,
        *,
        slots: int,
        huge_pages: bool | None = False,
        share_weights: bool = False,
    ) -> SessionConfig:
        """Return the settings of a session with ``slots`` sequences. Raises UsageError for a size that is
        none.
        """
        return SessionConfig(
            threads=provider.threads,
            slots=slots,
            max_context=self.max_context,
            kv_cache_bytes=read_size("--kv-cache-memory", self.kv_cache_memory),
            kv_dtype=self.kv_dtype,
            single_graph=self.single_graph,
            batch_invariant=self.batch_invariant,
            huge_pages=huge_pages,
            share_weights=share_weights,
            provider=provider.choice(),
            stages=StageChoice(_read_devices(self.stage_device), self.stage_processes),
        )


def _read_devices(value: str | None) -> tuple[int, ...]:
    """Return the numbers of ``--stage-device``. Raises UsageError."""
    if value is None:
        return ()
    parts = value.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        raise UsageError(
            f"--stage-device is {value[:80]!r}; expected a device number for each stage, like 0,1"
        )
    return tuple(map(int, parts))


class EngineFlags(FlagGroup, frozen=True):
    """What the engine reuses and guesses, and what it reads out of answers."""

    no_kv_cache: Annotated[
        bool,
        typer.Option(
            "--no-kv-cache", help="Recompute everything for every token (slow; to check the cache)."
        ),
    ] = False
    no_prefix_cache: Annotated[
        bool,
        typer.Option("--no-prefix-cache/--prefix-cache", help="Compute every prompt from its first token."),
    ] = False
    strict_reuse: Annotated[
        bool,
        typer.Option(
            "--strict-reuse/--no-strict-reuse",
            help="Of earlier requests, reuse only what was prefilled: the same bits as without reuse, but "
            "for what a cache in int8 rounds.",
        ),
    ] = False
    prefill_chunk: Annotated[
        int,
        typer.Option(
            min=16,
            max=1024,
            help="Most prompt tokens in one step. Fewer hold running answers up for less time; whether more "
            "are faster depends on the CPU (llorch tune tries it).",
        ),
    ] = DEFAULT_PREFILL_CHUNK
    lookup: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            help="Most tokens guessed at a time from the text so far, and checked in one step; 0: none.",
        ),
    ] = 0
    draft: Annotated[
        Path | None,
        typer.Option(
            "--draft",
            metavar="ARTIFACT",
            help="A smaller artifact of the same tokenizer that guesses tokens, which are checked in one "
            "step; left aside where that does not pay.",
            show_default=False,
        ),
    ] = None
    tool_format: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How calls of tools are read out of answers to chats: mistral, granite, llama3, hermes, "
            "none, or auto (by the chat template).",
        ),
    ] = AUTO
    reasoning_format: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The same for what a model thinks before it answers: granite, think, none, or auto.",
        ),
    ] = AUTO
    rank_format: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How documents are ranked at /v1/rerank: qwen3 (as Qwen3-Reranker was trained), none, or "
            "auto: qwen3 where the model's name says that it ranks.",
        ),
    ] = AUTO

    def config(self, session: SessionConfig) -> EngineConfig:
        """Return the settings of an engine. Raises UsageError for flags that do not go together."""
        if self.strict_reuse and self.no_prefix_cache:
            raise UsageError("--strict-reuse has no effect with --no-prefix-cache; leave one of them out")
        config = EngineConfig(
            session=session,
            kv_cache=not self.no_kv_cache,
            prefix_cache=not self.no_prefix_cache,
            strict_reuse=self.strict_reuse,
            prefill_chunk=self.prefill_chunk,
            lookup=self.lookup,
            draft=None if self.draft is None else self.draft.absolute(),
            tool_format=self.tool_format,
            rank_format=self.rank_format,
            reasoning_format=self.reasoning_format,
        )
        check_guesses(config)
        return config
