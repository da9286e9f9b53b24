"""Requests from what callers write: texts, token ids, and messages as OpenAI's clients send them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from llorch.settings import SamplingSettings, sampling_params
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.http.openai_prompts import read_messages
from llorch_serve.http.openai_schema import Message as OpenAIMessage
from llorch_serve.http.openai_tools import read_tool_choice
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
    try:
        found = msgspec.convert(list(messages), list[OpenAIMessage])
    except msgspec.ValidationError as error:
        raise InvalidRequestError([FieldViolation("messages", str(error))]) from error
    bad: list[FieldViolation] = []
    read = read_messages(found, bad)
    choice = read_tool_choice(tool_choice, bad)
    if bad:
        raise InvalidRequestError(bad)
    return ChatPrompt(
        read,
        tools=tuple(json.dumps(tool) for tool in tools),
        template_arguments=None if template_arguments is None else json.dumps(template_arguments),
        continue_final_message=continue_final_message,
        tool_choice=choice,
        parallel_tool_calls=parallel_tool_calls,
    )


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
