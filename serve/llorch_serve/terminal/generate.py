"""``llorch generate``: one answer or several, from an artifact in this process or from a running worker."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_serve.chat.parsing.registry import AUTO
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.errors import UsageError
from llorch_serve.requests import MAX_ANSWERS, AnswerOptions, GenerationRequest, GenerationUpdate
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.terminal.access import TlsCa, TlsCert, TlsKey, Token, read_access, refuse_access
from llorch_serve.terminal.answers import show_answers
from llorch_serve.terminal.flags import (
    AllowCpuNodes,
    BatchInvariant,
    Connect,
    EpLibrary,
    KvCacheDtype,
    Lookup,
    MaxContext,
    Model,
    ModelDir,
    Provider,
    ProviderOption,
    ReasoningFormat,
    SingleGraph,
    Threads,
    ToolFormat,
    Wait,
    provider_choice,
    refuse_invariant_lookup,
)
from llorch_serve.terminal.form import (
    ChoiceFlag,
    GrammarFlag,
    JsonObjectFlag,
    JsonSchemaFlag,
    RegexFlag,
    read_form,
)
from llorch_serve.terminal.prompt_flags import ChatFlags, read_prompt
from llorch_serve.terminal.sampling_flags import (
    Answers,
    BestOf,
    FrequencyPenalty,
    IgnoreEos,
    KeepSpecialTokens,
    LogitBias,
    MinP,
    MinTokens,
    PresencePenalty,
    RepeatLastN,
    RepetitionPenalty,
    Seed,
    Stop,
    StopTokenId,
    System,
    Temperature,
    TemplateArguments,
    TopK,
    TopP,
    TypicalP,
    read_bias,
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
    prompt: Annotated[str | None, typer.Option(help="Text to continue.", show_default=False)] = None,
    chat: Annotated[
        str | None,
        typer.Option(help="A user's message, put through the model's chat template.", show_default=False),
    ] = None,
    system: System = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --chat: a JSON list of the tools that may be called.",
            show_default=False,
        ),
    ] = None,
    template_arguments: TemplateArguments = None,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="Token ids to continue.", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    min_tokens: MinTokens = 0,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    typical_p: TypicalP = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    repeat_last_n: RepeatLastN = None,
    logit_bias: LogitBias = None,
    seed: Seed = None,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    keep_special_tokens: KeepSpecialTokens = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --json: each token's log-probability, and the N likeliest (0 to 20).",
            show_default=False,
        ),
    ] = None,
    n: Answers = 1,
    best_of: BestOf = None,
    echo: Annotated[bool, typer.Option("--echo", help="Show the prompt's text before the answer.")] = False,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="With --json: the same for each token of the prompt.", show_default=False
        ),
    ] = None,
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
    tool_format: ToolFormat = AUTO,
    reasoning_format: ReasoningFormat = AUTO,
    max_context: MaxContext = None,
    kv_dtype: KvCacheDtype = None,
    single_graph: SingleGraph = False,
    batch_invariant: BatchInvariant = False,
    threads: Threads = None,
    provider: Provider = None,
    provider_option: ProviderOption = None,
    ep_library: EpLibrary = None,
    allow_cpu_nodes: AllowCpuNodes = False,
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
    for flag, asked in (("--logprobs", logprobs), ("--prompt-logprobs", prompt_logprobs)):
        if asked is not None and not as_json:
            raise UsageError(f"{flag} shows in the JSON document alone; add --json")
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repeat_last_n=repeat_last_n,
        logit_bias=read_bias(logit_bias or ()),
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        keep_special_tokens=keep_special_tokens,
        structured=read_form(
            json_schema=json_schema, json_object=json_object, regex=regex, choice=choice, grammar=grammar
        ),
    )
    flags = ChatFlags(system, tools, template_arguments)
    answers = AnswerOptions(n, best_of, prompt_logprobs, echo)
    prompt_ = read_prompt(prompt, chat, prompt_ids, flags)
    request = GenerationRequest(str(uuid.uuid4()), prompt_, params, answers=answers)
    if connect is not None:
        local = {"DIR": model_dir, "--model": model, "--no-kv-cache": no_kv_cache, "--lookup": lookup or None}
        cache = {
            "--kv-dtype": kv_dtype,
            "--single-graph": single_graph,
            "--batch-invariant": batch_invariant,
            "--provider": provider,
            "--provider-option": provider_option,
            "--ep-library": ep_library,
            "--allow-cpu-nodes": allow_cpu_nodes,
        }
        local["--tool-format"] = None if tool_format == AUTO else tool_format
        local["--reasoning-format"] = None if reasoning_format == AUTO else reasoning_format
        refuse_local_flags(connect, {**local, **cache, "--max-context": max_context, "--threads": threads})
        access = read_access(token, tls_ca, tls_cert, tls_key)
        show_answers(_remote(connect, access, wait, request), n, as_json=as_json)
        return
    refuse_wait(wait)
    refuse_access(token, tls_ca, tls_cert, tls_key)
    target = resolve_artifact(find_target(model_dir, model))
    # Numbers out of range are refused by the worker, by name.
    slots = min(max(answers.generated, 1), MAX_ANSWERS)
    session = SessionConfig(
        threads=threads,
        slots=slots,
        max_context=max_context,
        kv_dtype=kv_dtype,
        single_graph=single_graph,
        batch_invariant=batch_invariant,
        provider=provider_choice(provider, provider_option, ep_library, allow_cpu_nodes=allow_cpu_nodes),
    )
    refuse_invariant_lookup(batch_invariant=batch_invariant, lookup=lookup)
    if no_kv_cache and lookup:
        raise UsageError("--lookup has no effect with --no-kv-cache; leave one of them out")
    config = EngineConfig(
        session=session,
        kv_cache=not no_kv_cache,
        lookup=lookup,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
    )
    show_answers(_local(target, config, request), n, as_json=as_json)


def _local(folder: Path, config: EngineConfig, request: GenerationRequest) -> Iterator[GenerationUpdate]:
    from llorch_serve.terminal.opening import open_worker
    from llorch_serve.worker.local import stream

    worker = open_worker(folder, config, tokenizer=find_tokenizer())
    try:
        yield from stream(worker, request)
    finally:
        worker.close()


def _remote(
    address: str, access: Access, wait: float | None, request: GenerationRequest
) -> Iterator[GenerationUpdate]:
    from llorch_serve.client.blocking import WorkerClient

    with WorkerClient(address, access) as client:
        if wait:
            client.wait_until_ready(wait)
        # Which answers are the best shows when all have ended, so that nothing streams.
        best = request.answers.best_of is not None
        yield from client.complete(request) if best else client.generate(request)
