"""``llorch generate``: one answer, from an artifact in this process or from a running worker."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.errors import LlorchError, UsageError
from llorch_serve.requests import (
    ChatMessage,
    ChatPrompt,
    Completion,
    GenerationRequest,
    GenerationUpdate,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from llorch_serve.sampling import SamplingParams
from llorch_serve.terminal.console import say, write, write_json
from llorch_serve.terminal.flags import (
    Connect,
    KvCacheDtype,
    Lookup,
    MaxContext,
    Model,
    ModelDir,
    SingleGraph,
    Threads,
    Wait,
)
from llorch_serve.terminal.form import (
    ChoiceFlag,
    GrammarFlag,
    JsonObjectFlag,
    JsonSchemaFlag,
    RegexFlag,
    read_form,
)
from llorch_serve.terminal.target import (
    find_target,
    find_tokenizer,
    refuse_local_flags,
    refuse_wait,
    resolve_artifact,
)


def command(
    model_dir: ModelDir = None,
    model: Model = None,
    connect: Connect = None,
    wait: Wait = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.", show_default=False)] = None,
    chat: Annotated[
        str | None,
        typer.Option(help="A user's message, put through the model's chat template.", show_default=False),
    ] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="Token ids to continue.", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    min_tokens: Annotated[int, typer.Option(help="Stop tokens are impossible before so many.")] = 0,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 to 2; 0 is greedy. Default: the model's, else 0.", show_default=False),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Keep the k likeliest tokens; 0: all.", show_default=False)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Keep the likeliest tokens that reach p together.", show_default=False),
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below p times the likeliest.", show_default=False)
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Above 1: tokens already present become less likely.", show_default=False),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", show_default=False)] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this string; may be repeated.", show_default=False)
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="The model's stop tokens do not end it.")
    ] = False,
    json_schema: JsonSchemaFlag = None,
    json_object: JsonObjectFlag = False,
    regex: RegexFlag = None,
    choice: ChoiceFlag = None,
    grammar: GrammarFlag = None,
    no_kv_cache: Annotated[
        bool,
        typer.Option(
            "--no-kv-cache", help="Recompute everything for every token (slow; to check the cache)."
        ),
    ] = False,
    lookup: Lookup = 0,
    max_context: MaxContext = None,
    kv_dtype: KvCacheDtype = None,
    single_graph: SingleGraph = False,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Generate one answer and stream it to stdout.

    For example:

        llorch generate artifacts/smollm2 --chat "What is the capital of France?"

        llorch generate model.gguf --prompt "Once upon a time" --temperature 0.8 --seed 7

        llorch generate --connect 127.0.0.1:50051 --chat "Hello" --json

        llorch generate artifacts/smollm2 --chat "Is the sky blue?" --choice yes --choice no

    """
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        structured=read_form(
            json_schema=json_schema, json_object=json_object, regex=regex, choice=choice, grammar=grammar
        ),
    )
    request = GenerationRequest(str(uuid.uuid4()), read_prompt(prompt, chat, prompt_ids), params)
    if connect is not None:
        local = {"DIR": model_dir, "--model": model, "--no-kv-cache": no_kv_cache, "--lookup": lookup or None}
        cache = {"--kv-dtype": kv_dtype, "--single-graph": single_graph}
        refuse_local_flags(connect, {**local, **cache, "--max-context": max_context, "--threads": threads})
        _print_answer(_remote(connect, wait, request), as_json)
        return
    refuse_wait(wait)
    target = resolve_artifact(find_target(model_dir, model))
    session = SessionConfig(
        threads=threads, slots=1, max_context=max_context, kv_dtype=kv_dtype, single_graph=single_graph
    )
    if no_kv_cache and lookup:
        raise UsageError("--lookup has no effect with --no-kv-cache; leave one of them out")
    config = EngineConfig(session=session, kv_cache=not no_kv_cache, lookup=lookup)
    _print_answer(_local(target, config, request), as_json)


def read_prompt(prompt: str | None, chat: str | None, prompt_ids: str | None) -> Prompt:
    """Return the one prompt that is given. Raises UsageError for none, several, or ids that are not numbers."""
    given = [
        name
        for name, value in (("--prompt", prompt), ("--chat", chat), ("--prompt-ids", prompt_ids))
        if value is not None
    ]
    if len(given) != 1:
        raise UsageError(
            f"found {' and '.join(given) or 'no prompt'}; give exactly one of --prompt, --chat, --prompt-ids"
        )
    if prompt is not None:
        return TextPrompt(prompt)
    if chat is not None:
        return ChatPrompt((ChatMessage("user", chat),))
    assert prompt_ids is not None
    try:
        return TokenPrompt(tuple(int(part) for part in prompt_ids.split(",") if part.strip()))
    except ValueError as error:
        raise UsageError(
            f"--prompt-ids is {prompt_ids!r}; expected numbers separated by commas, like 1,2,3"
        ) from error


def _local(folder: Path, config: EngineConfig, request: GenerationRequest) -> Iterator[GenerationUpdate]:
    from llorch_serve.local import stream
    from llorch_serve.terminal.opening import open_worker

    worker = open_worker(folder, config, tokenizer=find_tokenizer())
    try:
        yield from stream(worker, request)
    finally:
        worker.close()


def _remote(address: str, wait: float | None, request: GenerationRequest) -> Iterator[GenerationUpdate]:
    from llorch_serve.client import WorkerClient

    with WorkerClient(address) as client:
        if wait:
            client.wait_until_ready(wait)
        yield from client.generate(request)


def _print_answer(updates: Iterator[GenerationUpdate], as_json: bool) -> None:
    text: list[str] = []
    ids: list[int] = []
    completion: Completion | None = None
    for update in updates:
        text.append(update.text)
        ids.extend(update.token_ids)
        completion = update.completion
        if not as_json:
            write(update.text)
    if completion is None:
        raise LlorchError("the answer ended without a completion; please report this")
    if as_json:
        write_json(_document("".join(text), ids, completion))
        return
    write("\n")
    if completion.reason.value == "length":
        say(
            f"(ended after {completion.generated_tokens} tokens: the limit of --max-tokens or of the context)"
        )


def _document(text: str, ids: list[int], completion: Completion) -> dict[str, object]:
    return {
        "text": text,
        "token_ids": ids,
        "finish_reason": completion.reason.value,
        "stop_matched": completion.stop_matched,
        "prompt_tokens": completion.prompt_tokens,
        "generated_tokens": completion.generated_tokens,
        "cached_tokens": completion.cached_tokens,
        "drafted_tokens": completion.drafted_tokens,
        "accepted_tokens": completion.accepted_tokens,
        "seed": completion.seed,
        "timings": completion.timings,
    }
