"""From OpenAI's bodies to requests for the generator, and to what the answer must look like.

Input: the raw body. Output: a :class:`llorch_serve.http.service.Plan`. What the engine cannot do is refused
by the field's name with what is accepted instead; ranges of sampling values are judged by the generator,
whose names for fields are turned back into OpenAI's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from llorch_serve.calls.callers import Caller
from llorch_serve.errors import FieldViolation, ModelMismatchError
from llorch_serve.http.fields import read_struct, refuse_fields
from llorch_serve.http.openai_forms import read_form, schema_field
from llorch_serve.http.openai_numbers import read_filters, read_limit, read_seed
from llorch_serve.http.openai_prompts import (
    continues_last,
    read_messages,
    read_prompts,
    refuse,
    template_arguments,
)
from llorch_serve.http.openai_schema import ChatBody, CompletionBody, Shared
from llorch_serve.http.openai_tools import names_function, read_tool_choice
from llorch_serve.http.service import AnswerPlan, Plan
from llorch_serve.requests import (
    AnswerOptions,
    ChatPrompt,
    GenerationRequest,
    ModelInfo,
    Prompt,
)
from llorch_serve.sampling.params import SamplingParams

DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's own, for /v1/completions alone

_MAX_ID_DIGITS: Final = 18
_INDEXED: Final = re.compile(r"(?P<name>[a-z_]+)(?P<rest>.*)")


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What the answer says beside its text. answer_id: its id. created: seconds since 1970. model: the served
    one's id.

    include_usage: a stream ends with the usage of the whole request.
    answers: how many choices each prompt has. logprobs: choices carry log-probabilities.
    ignored: fields of the body that are not known and were left aside.
    """

    answer_id: str
    created: int
    model: str
    include_usage: bool
    answers: int
    logprobs: bool
    ignored: tuple[str, ...] = ()


def read_completion(raw: bytes, info: ModelInfo, caller: Caller, ignored: list[str] | None = None) -> Plan:
    """Return what a body of /v1/completions asks for. ignored: gets unknown fields, as in ``read_struct``.

    Raises InvalidRequestError or ModelMismatchError.
    """
    body = read_struct(raw, CompletionBody, ignored)
    bad: list[FieldViolation] = []
    best_of = None if body.best_of == body.n else body.best_of  # all of n are the best of n
    if body.stream and best_of is not None:
        found = "a stream cannot know yet which answers are best; leave it out, or leave stream out"
        bad.append(FieldViolation("best_of", found))
    refuse(bad, "suffix", body.suffix, (None, ""))
    prompts = read_prompts(body.prompt, bad)
    limit = read_limit(body.max_tokens, DEFAULT_COMPLETION_TOKENS)
    sampling = replace(_read_sampling(body, bad), max_tokens=limit, logprobs=body.logprobs)
    answers = AnswerOptions(body.n, best_of, body.logprobs if body.echo else None, body.echo)
    names = {"input": "prompt", "prompt_logprobs": "logprobs"}
    options = _Options(sampling, answers, tuple(ignored or ()))
    return _plan("cmpl-", prompts, options, body, bad, info, caller, names)


def read_chat(raw: bytes, info: ModelInfo, caller: Caller, ignored: list[str] | None = None) -> Plan:
    """Return what a body of /v1/chat/completions asks for. ignored: gets unknown fields, as in
    ``read_struct``.

    Raises InvalidRequestError or ModelMismatchError.
    """
    body = read_struct(raw, ChatBody, ignored)
    return plan_chat(body, info, caller, ignored=ignored or ())


def plan_chat(
    body: ChatBody,
    info: ModelInfo,
    caller: Caller,
    prefix: str = "chatcmpl-",
    *,
    ignored: Sequence[str] = (),
) -> Plan:
    """Return what a chat asks for, whichever API it came through. prefix: of the answer's id.

    ignored: fields of the body that were left aside.
    Raises InvalidRequestError or ModelMismatchError.
    """
    bad: list[FieldViolation] = []
    if body.top_logprobs and not body.logprobs:
        bad.append(
            FieldViolation("top_logprobs", "set without logprobs; set that to true, or leave this out")
        )
    tool_choice = read_tool_choice(body.tool_choice, bad)
    refuse(bad, "functions", body.functions, (None, []))
    refuse(bad, "function_call", body.function_call, (None, "none", "auto"))
    refuse(bad, "modalities", body.modalities, (None, ["text"]))
    for name in ("audio", "prediction", "reasoning_effort", "verbosity", "web_search_options"):
        refuse(bad, name, getattr(body, name), (None,))
    prompt = ChatPrompt(
        read_messages(body.messages, bad),
        # With none the model is not to call, so it is not told of tools.
        tools=() if body.tool_choice == "none" else tuple(bytes(tool).decode() for tool in body.tools or ()),
        template_arguments=template_arguments(body, bad),
        continue_final_message=continues_last(body, bad),
        tool_choice=tool_choice,
        # A function that is named is called exactly once, as OpenAI has it.
        parallel_tool_calls=body.parallel_tool_calls is not False and not names_function(body.tool_choice),
    )
    limit, limit_name = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        if limit not in (None, body.max_completion_tokens):
            bad.append(
                FieldViolation("max_tokens", f"found {limit} beside max_completion_tokens; send only one")
            )
        limit, limit_name = body.max_completion_tokens, "max_completion_tokens"
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    form = read_form(body.response_format, bad)
    limit = read_limit(limit, None)
    sampling = replace(_read_sampling(body, bad), max_tokens=limit, logprobs=logprobs, structured=form)
    names = {
        "input": "messages",
        "max_tokens": limit_name,
        "logprobs": "top_logprobs",
        "json_schema": schema_field(body.response_format),
    }
    options = _Options(sampling, AnswerOptions(body.n), tuple(ignored))
    return _plan(prefix, [prompt], options, body, bad, info, caller, names)


@dataclass(frozen=True, slots=True)
class _Options:
    """What is asked of every prompt of a body. ignored: see :class:`AnswerShape`."""

    sampling: SamplingParams
    answers: AnswerOptions
    ignored: tuple[str, ...]


def _plan(
    prefix: str,
    prompts: Sequence[Prompt],
    options: _Options,
    body: Shared,
    bad: list[FieldViolation],
    info: ModelInfo,
    caller: Caller,
    names: dict[str, str],
) -> Plan:
    if bad:
        refuse_fields(bad)
    check_model(body.model, info)
    answer_id = caller.answer_id(prefix)
    several = len(prompts) > 1
    requests = tuple(
        GenerationRequest(
            f"{answer_id}-{index}" if several else answer_id,
            prompt,
            options.sampling,
            answers=options.answers,
            client_id=caller.client,
            correlation_id=caller.correlation_id,
            traceparent=caller.traceparent,
        )
        for index, prompt in enumerate(prompts)
    )
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    shape = AnswerShape(
        answer_id,
        int(caller.now()),
        body.model or info.names[0],
        include_usage,
        answers=options.answers.n,
        logprobs=options.sampling.logprobs is not None,
        ignored=options.ignored,
    )
    return Plan(requests, AnswerPlan(body.stream, lambda name: _rename(name, names), shape))


def check_model(asked: str | None, info: ModelInfo) -> None:
    """Raise ModelMismatchError unless the served model is asked for by one of its names, or none is."""
    if asked is not None and asked not in info.names:
        served = ", ".join(map(repr, info.names))
        raise ModelMismatchError(
            f"model {asked[:200]!r} was asked for, this worker serves {served}; ask for that, leave model "
            "out, call another worker, or start this one with --served-model-name"
        )


def _rename(field: str, names: dict[str, str]) -> str:
    """Return the body's name for a generator's: sampling.stop[0] is stop[0], input.chat.messages[0]
    messages[0].
    """
    if field.startswith("input.chat.template_arguments"):
        return "chat_template_kwargs"
    own = ("messages", "tools", "tool_choice", "continue_final_message")
    if field.startswith(tuple(f"input.chat.{name}" for name in own)):
        return field.removeprefix("input.chat.")
    if field.startswith("input"):
        return names["input"]
    found = _INDEXED.fullmatch(field.removeprefix("sampling."))
    return field if found is None else names.get(found["name"], found["name"]) + found["rest"]


def _read_sampling(body: Shared, bad: list[FieldViolation]) -> SamplingParams:
    if body.stream_options is not None:
        if not body.stream:
            bad.append(FieldViolation("stream_options", "set without stream; leave it out, or set stream"))
        padded = body.stream_options.include_obfuscation
        refuse(bad, "stream_options.include_obfuscation", padded, (None, False))
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    sampling = SamplingParams(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        typical_p=body.typical_p,
        repetition_penalty=body.repetition_penalty,
        repeat_last_n=body.repeat_last_n,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_read_bias(body.logit_bias or {}, bad),
        seed=read_seed(body.seed, bad),
        min_tokens=body.min_tokens,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
    )
    return read_filters(sampling)


def _read_bias(bias: dict[str, float], bad: list[FieldViolation]) -> dict[int, float]:
    """Return biases by token id, which JSON can only have as text."""
    ids = {key: int(key) for key in bias if key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS}
    strange = [key for key in bias if key not in ids]
    if strange:
        found = f"found the key {strange[0][:32]!r}, expected token ids"
        bad.append(FieldViolation("logit_bias", found))
    return {ids[key]: value for key, value in bias.items() if key in ids}
