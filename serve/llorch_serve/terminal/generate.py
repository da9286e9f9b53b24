"""``llorch generate``: one answer or several, from an artifact in this process or from a running worker."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Annotated

import typer

from llorch_serve.config import EngineConfig
from llorch_serve.requests import MAX_ANSWERS, ChatPrompt, GenerationRequest
from llorch_serve.terminal.access import WorkerFlags
from llorch_serve.terminal.answers import show_answers
from llorch_serve.terminal.generators import open_generator
from llorch_serve.terminal.groups import composed, only
from llorch_serve.terminal.prompt_flags import PromptFlags
from llorch_serve.terminal.sampling_flags import AnswerFlags, SamplingFlags
from llorch_serve.terminal.session_flags import EngineFlags, ProviderFlags, SessionFlags
from llorch_serve.terminal.structured_flags import StructuredFlags
from llorch_serve.terminal.target import ModelFlags


@composed
def command(
    model: ModelFlags,
    worker: WorkerFlags,
    prompt: PromptFlags,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    *,
    sampling: SamplingFlags,
    answers: AnswerFlags,
    form: StructuredFlags,
    engine: Annotated[EngineFlags, only("no_kv_cache", "lookup", "draft", "tool_format", "reasoning_format")],
    session: Annotated[
        SessionFlags,
        only("max_context", "kv_dtype", "single_graph", "batch_invariant", "stage_device", "stage_processes"),
    ],
    provider: ProviderFlags,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Generate one answer and stream it to stdout, or several and print them when all have ended.

    For example:

        llorch generate artifacts/smollm2 --chat "What is the capital of France?"

        llorch generate model.gguf --prompt "Once upon a time" --temperature 0.8 --seed 7

        llorch generate --connect 127.0.0.1:50051 --chat "Hello" --json

        llorch generate artifacts/smollm2 --prompt "Once" --temperature 1 --n 4

        llorch generate artifacts/smollm2 --chat "Is the sky blue?" --choice yes --choice no

    """
    answers.check(as_json=as_json)
    params = replace(sampling.params(max_tokens), logprobs=answers.logprobs, structured=form.structured())
    options = answers.options()
    request = GenerationRequest(str(uuid.uuid4()), prompt.read(), params, answers=options)

    def config() -> EngineConfig:
        # Numbers out of range are refused by the worker, by name.
        slots = min(max(options.generated, 1), MAX_ANSWERS)
        return engine.config(session.config(provider, slots=slots))

    local = [*engine.given(), *session.given(), *provider.given()]
    chats = isinstance(request.prompt, ChatPrompt)
    with open_generator(model, worker, local, config, chats=chats) as generator:
        show_answers(generator.generate(request), options.n, as_json=as_json)
