"""Requests from what callers write: texts, token ids, and messages as OpenAI's clients send them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from llorch.settings import SamplingSettings, sampling_params
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.http.openai_prompts import continues_last, read_messages
from llorch_serve.http.openai_schema import ChatBody
from llorch_serve.http.openai_schema import Message as OpenAIMessage
from llorch_serve.http.openai_tools import names_function, read_tool_choice
from llorch_serve.http.unknown_fields import fields_of, holds_nothing, names_of, structure_in
from llorch_serve.requests import (
    AnswerOptions,
    ChatPrompt,
    EmbedRequest,
    GenerationRequest,
    Prompt,
    ScoreRequest,
    TextPrompt,
    TokenPrompt,
)

Text: TypeAlias = str | Sequence[int]
"""A text, or the ids of its tokens."""

Message: TypeAlias = Mapping[str, Any]
"""A message as OpenAI's clients send it: ``role``, ``content``, ``tool_calls``, ``tool_call_id``."""

Messages: TypeAlias = str | Sequence[Message]
"""A conversation; a text alone is one message of the user's."""


def text_prompt(prompt: Text) -> TextPrompt | TokenPrompt:
    """Return a prompt that is no chat. Raises TypeError for what is neither a text nor ids."""
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    ids = tuple(prompt)
    if not all(isinstance(token, int) for token in ids):
        raise TypeError("a prompt is a text or a sequence of token ids; a conversation goes to chat()")
    return TokenPrompt(ids)


def chat_prompt(
    messages: Messages,
    *,
    tools: Iterable[Mapping[str, Any]] = (),
    template_arguments: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool = True,
) -> ChatPrompt:
    """Return a conversation. Raises InvalidRequestError for messages that no template can be given, and a
    choice of tools that is none.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    given = list(messages)
    try:
        found = msgspec.convert(given, list[OpenAIMessage])
    except msgspec.ValidationError as error:
        raise InvalidRequestError([FieldViolation("messages", str(error))]) from error
    bad = list(_unknown_fields(given, list[OpenAIMessage], "messages"))
    read = read_messages(found, bad)
    choice = read_tool_choice(tool_choice, bad)
    continued = continues_last(ChatBody(messages=found, continue_final_message=continue_final_message), bad)
    if bad:
        raise InvalidRequestError(bad)
    return ChatPrompt(
        read,
        tools=tuple(json.dumps(tool) for tool in tools),
        template_arguments=None if template_arguments is None else json.dumps(template_arguments),
        continue_final_message=continued,
        tool_choice=choice,
        # A function that is named is called exactly once, as OpenAI has it.
        parallel_tool_calls=parallel_tool_calls and not names_function(tool_choice),
    )


def _unknown_fields(value: Any, type_: Any, path: str) -> Iterator[FieldViolation]:
    """Yield what no message has, which is never left aside in silence."""
    kind = structure_in(type_)
    if kind is None:
        return
    if isinstance(value, Mapping):
        known = fields_of(kind)
        for name, inner in value.items():
            if name in known:
                yield from _unknown_fields(inner, known[name][0], f"{path}.{name}")
            elif not holds_nothing(inner):
                found = f"unknown field; known are {', '.join(names_of(kind))}; leave it out"
                yield FieldViolation(f"{path}.{name}", found)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, inner in enumerate(value):
            yield from _unknown_fields(inner, kind, f"{path}[{index}]")


def any_prompt(prompt: Text | Sequence[Message]) -> Prompt:
    """Return a prompt of either kind: a sequence of mappings is a conversation."""
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
        return chat_prompt([message for message in prompt if isinstance(message, Mapping)])
    return text_prompt(prompt)  # type: ignore[arg-type]  # checked there


def request(
    prompt: Prompt, settings: SamplingSettings, answers: AnswerOptions | None = None
) -> GenerationRequest:
    """Return a request for answers."""
    return GenerationRequest(
        str(uuid.uuid4()), prompt, sampling_params(settings), answers=answers or AnswerOptions()
    )


def embed_request(
    texts: Sequence[Text], dimensions: int | None, truncate_prompt_tokens: int | None
) -> EmbedRequest:
    """Return a request for vectors."""
    if isinstance(texts, str):
        raise TypeError("texts is one text; expected a list of texts")
    return EmbedRequest(
        str(uuid.uuid4()),
        tuple(map(text_prompt, texts)),
        dimensions=dimensions,
        truncate_prompt_tokens=truncate_prompt_tokens,
    )


def score_request(context: Text, continuations: Iterable[Text], logprobs: int | None) -> ScoreRequest:
    """Return a request for scores."""
    if isinstance(continuations, str):
        raise TypeError("continuations is one text; expected a list of texts")
    return ScoreRequest(
        str(uuid.uuid4()), text_prompt(context), tuple(map(text_prompt, continuations)), logprobs=logprobs
    )
