"""``llorch chat``: a conversation at the terminal, with an artifact in this process or with a running
worker.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llorch_serve.config import EngineConfig
from llorch_serve.terminal.access import WorkerFlags
from llorch_serve.terminal.chat_loop import ChatLoop
from llorch_serve.terminal.chat_screen import PlainReader, TerminalReader
from llorch_serve.terminal.console import show_aside
from llorch_serve.terminal.conversation import Conversation
from llorch_serve.terminal.generators import open_generator
from llorch_serve.terminal.groups import composed, only
from llorch_serve.terminal.prompt_flags import PromptFlags
from llorch_serve.terminal.sampling_flags import SamplingFlags
from llorch_serve.terminal.session_flags import EngineFlags, ProviderFlags, SessionFlags
from llorch_serve.terminal.target import ModelFlags


@composed
def command(
    model: ModelFlags,
    worker: WorkerFlags,
    prompt: Annotated[PromptFlags, only("system", "template_arguments")],
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of an answer. Default: what the context holds.", show_default=False),
    ] = None,
    *,
    sampling: Annotated[
        SamplingFlags,
        only("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop"),
    ],
    engine: Annotated[EngineFlags, only("reasoning_format")],
    session: Annotated[
        SessionFlags, only("max_context", "kv_dtype", "single_graph", "stage_device", "stage_processes")
    ],
    threads: Annotated[ProviderFlags, only("threads")],
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Keep no file of questions for the arrow keys.")
    ] = False,
) -> None:
    """Chat with a model at the terminal; /help lists what else can be done there.

    For example:

        llorch chat artifacts/smollm2 --system "Answer in one sentence."

        llorch chat --connect 127.0.0.1:50051 --temperature 0.8

    """
    conversation = Conversation(prompt.system, sampling.params(max_tokens), prompt.template_arguments)
    loops: list[ChatLoop] = []  # filled below, once there is a model
    # First, since it may say what is missing before a model is loaded.
    terminal = sys.stdin.isatty()
    reader = (
        TerminalReader(lambda: loops[0].status(), keep_history=not no_history) if terminal else PlainReader()
    )

    def config() -> EngineConfig:
        return engine.config(session.config(threads, slots=1))

    local = [*session.given(), *engine.given(), *threads.given()]
    with open_generator(model, worker, local, config) as generator:
        info = generator.model_info()
        loop = ChatLoop(conversation, info, generator.generate)
        loops.append(loop)
        if terminal:
            show_aside(
                f"{info.model_id} ({info.precision}) on {info.provider}; /help for help, Ctrl-D to leave"
            )
        loop.run(reader)
