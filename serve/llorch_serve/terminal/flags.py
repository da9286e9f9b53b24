"""Arguments that several commands share, so that they read and mean the same everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from llorch_serve.artifact.manifest import KvDtype
from llorch_serve.errors import UsageError
from llorch_serve.observe.logs import LogFormat, LogLevel
from llorch_serve.providers import ProviderChoice

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}

ModelDir = Annotated[
    str | None,
    typer.Argument(
        metavar="DIR",
        help="Artifact folder, one made by onnxruntime-genai or Optimum, or a source (GGUF file, Hugging "
        "Face folder, hub id) that is exported once into a cache.",
        show_default=False,
    ),
]
Model = Annotated[str | None, typer.Option("--model", help="The same as DIR.", show_default=False)]
Connect = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Use a running worker instead.", show_default=False),
]
Wait = Annotated[
    float | None,
    typer.Option(min=0, help="With --connect: seconds to wait for a starting worker.", show_default=False),
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        help="Tokens per sequence. Default: the model's, or less if memory is short.", show_default=False
    ),
]
KvCacheMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for the KV cache, like 2GiB or 500MiB. Default: most of what is free.",
        show_default=False,
    ),
]
KvCacheDtype = Annotated[
    KvDtype | None,
    typer.Option(
        "--kv-dtype",
        help="What the KV cache holds; int8 takes a quarter of float32's memory. Default: int8 if the "
        "artifact has a graph for it.",
        show_default=False,
    ),
]
SingleGraph = Annotated[
    bool,
    typer.Option(
        "--single-graph/--no-single-graph",
        help="Run prompts on the graph that decodes too: slower, without the memory of a second one.",
    ),
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant/--no-batch-invariant",
        help="Run 4-bit weights on even numbers of rows, so that an answer is the same bits whatever else is "
        "running.",
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
NoPrefixCache = Annotated[
    bool,
    typer.Option("--no-prefix-cache/--prefix-cache", help="Compute every prompt from its first token."),
]
StrictReuse = Annotated[
    bool,
    typer.Option(
        "--strict-reuse/--no-strict-reuse",
        help="Of earlier requests, reuse only what was prefilled: the same bits as without reuse, but for "
        "what a cache in int8 rounds.",
    ),
]
Lookup = Annotated[
    int,
    typer.Option(
        min=0,
        max=64,
        help="Most tokens guessed at a time from the text so far, and checked in one step; 0: none.",
    ),
]
ToolFormat = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="How calls of tools are read out of answers to chats: mistral, granite, llama3, hermes, none, "
        "or auto (by the chat template).",
    ),
]
ReasoningFormat = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The same for what a model thinks before it answers: granite, think, none, or auto.",
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Default: all CPUs allowed.", show_default=False)]

Http = Annotated[
    str | None,
    typer.Option(
        "--http",
        metavar="HOST:PORT",
        envvar="LLORCH_HTTP",
        help="Serve HTTP too: OpenAI's routes, /health, /metrics and a page. A port alone means the "
        "loopback. Needs the extra http.",
        show_default=False,
    ),
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        "--otlp-endpoint",
        metavar="URL",
        envvar="LLORCH_OTLP_ENDPOINT",
        help="Send a span of each request over OTLP/HTTP, like http://127.0.0.1:4318. Needs the extra otel.",
        show_default=False,
    ),
]
LogFormatFlag = Annotated[
    LogFormat,
    typer.Option("--log-format", envvar="LLORCH_LOG_FORMAT", help="How log lines on stderr look."),
]
LogLevelFlag = Annotated[
    LogLevel,
    typer.Option("--log-level", envvar="LLORCH_LOG_LEVEL", help="What is logged, and what is graver."),
]


Provider = Annotated[
    str | None,
    typer.Option(
        "--provider",
        metavar="NAME",
        help="What runs the graph: cpu, cuda, coreml, directml, openvino, webgpu, tensorrt, mlx. Default: "
        "cpu.",
        show_default=False,
    ),
]
ProviderOption = Annotated[
    list[str] | None,
    typer.Option(
        "--provider-option",
        metavar="KEY=VALUE",
        help="An option of the provider; may be repeated.",
        show_default=False,
    ),
]
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


def provider_choice(
    provider: str | None, options: list[str] | None, library: Path | None, *, allow_cpu_nodes: bool
) -> ProviderChoice:
    """Return what these flags ask for together."""
    return ProviderChoice(provider, tuple(options or ()), library, allow_cpu_nodes)


def read_size(flag: str, value: str | None) -> int | None:
    """Return the bytes that a size like ``2GiB``, ``500MB`` or ``1048576`` stands for. Raises UsageError."""
    if value is None:
        return None
    match = _SIZE.fullmatch(value.strip())
    size = 0 if match is None else int(float(match[1]) * _UNITS[(match[2] or "").upper()])
    if size < 1:
        raise UsageError(f"{flag} is {value!r}; expected a number of bytes, like 2GiB, 500MiB or 1000000000")
    return size


def refuse_invariant_lookup(*, batch_invariant: bool, lookup: int) -> None:
    """Raise UsageError if answers must not depend on the batch and guesses, which do, are asked for."""
    if batch_invariant and lookup:
        raise UsageError(
            "--batch-invariant does not go with --lookup, whose checks depend on how many sequences are "
            "running; leave one of them out"
        )


def refuse_strict_reuse(*, strict_reuse: bool, no_prefix_cache: bool) -> None:
    """Raise UsageError if reuse is both restricted and off."""
    if strict_reuse and no_prefix_cache:
        raise UsageError("--strict-reuse has no effect with --no-prefix-cache; leave one of them out")
