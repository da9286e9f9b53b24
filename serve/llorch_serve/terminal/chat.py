"""``llorch chat``: a conversation at the terminal, with an artifact in this process or with a running
worker.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_serve.chat.parsing.registry import AUTO
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.requests import ModelInfo
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.terminal.access import TlsCa, TlsCert, TlsKey, Token, read_access, refuse_access
from llorch_serve.terminal.chat_loop import ChatLoop, Generate
from llorch_serve.terminal.chat_screen import PlainReader, TerminalReader
from llorch_serve.terminal.console import show_aside
from llorch_serve.terminal.conversation import Conversation
from llorch_serve.terminal.flags import (
    Connect,
    KvCacheDtype,
    MaxContext,
    Model,
    ModelDir,
    ReasoningFormat,
    SingleGraph,
    Threads,
    Wait,
)
from llorch_serve.terminal.sampling_flags import (
    MinP,
    RepetitionPenalty,
    Seed,
    Stop,
    System,
    Temperature,
    TemplateArguments,
    TopK,
    TopP,
)
from llorch_serve.terminal.target import (
    find_target,
    find_tokenizer,
    refuse_local_flags,
    refuse_wait,
    resolve_artifact,
)

if TYPE_CHECKING:
    from llorch_serve.client.channel import Access


def command(
    model_dir: ModelDir = None,
    model: Model = None,
    connect: Connect = None,
    wait: Wait = None,
    token: Token = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    system: System = None,
    template_arguments: TemplateArguments = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of an answer. Default: what the context holds.", show_default=False),
    ] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    reasoning_format: ReasoningFormat = AUTO,
    max_context: MaxContext = None,
    kv_dtype: KvCacheDtype = None,
    single_graph: SingleGraph = False,
    threads: Threads = None,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Keep no file of questions for the arrow keys.")
    ] = False,
) -> None:
    """Chat with a model at the terminal; /help lists what else can be done there.

    For example:

        llorch chat artifacts/smollm2 --system "Answer in one sentence."

        llorch chat --connect 127.0.0.1:50051 --temperature 0.8

    """
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
    )
    conversation = Conversation(system, params, template_arguments)
    status: list[ChatLoop] = []  # filled below, once there is a model
    # First, since it may say what is missing before a model is loaded.
    terminal = sys.stdin.isatty()
    reader = (
        TerminalReader(lambda: status[0].status(), keep_history=not no_history) if terminal else PlainReader()
    )
    if connect is not None:
        local = {"DIR": model_dir, "--model": model, "--kv-dtype": kv_dtype, "--single-graph": single_graph}
        local["--reasoning-format"] = None if reasoning_format == AUTO else reasoning_format
        refuse_local_flags(connect, {**local, "--max-context": max_context, "--threads": threads})
        opened = _remote(connect, read_access(token, tls_ca, tls_cert, tls_key), wait)
    else:
        refuse_wait(wait)
        refuse_access(token, tls_ca, tls_cert, tls_key)
        session = SessionConfig(
            threads=threads, slots=1, max_context=max_context, kv_dtype=kv_dtype, single_graph=single_graph
        )
        config = EngineConfig(session=session, reasoning_format=reasoning_format)
        opened = _local(find_target(model_dir, model), config)
    with opened as (info, generate):
        loop = ChatLoop(conversation, info, generate)
        status.append(loop)
        if terminal:
            show_aside(
                f"{info.model_id} ({info.precision}) on {info.provider}; /help for help, Ctrl-D to leave"
            )
        loop.run(reader)


@contextlib.contextmanager
def _local(target: str, config: EngineConfig) -> Iterator[tuple[ModelInfo, Generate]]:
    from llorch_serve.terminal.opening import open_worker
    from llorch_serve.worker.local import stream

    worker = open_worker(resolve_artifact(target), config, tokenizer=find_tokenizer())
    try:
        yield worker.model_info(), partial(stream, worker)
    finally:
        worker.close()


@contextlib.contextmanager
def _remote(address: str, access: Access, wait: float | None) -> Iterator[tuple[ModelInfo, Generate]]:
    from llorch_serve.client.blocking import WorkerClient

    with WorkerClient(address, access) as client:
        if wait:
            client.wait_until_ready(wait)
        yield client.model_info(), client.generate
