"""From a chat prompt to the plain values that a template sees: dicts, lists, texts and numbers, as transformers gives them.

The prompt comes from a request and is checked here; values go to the chat module, which marks and renders them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.json_errors import NOT_JSON
from llorch_serve.requests import ChatMessage, ChatPrompt, ToolCall

FIELD: Final = "input.chat"
MAX_DEPTH: Final = (
    64  # of JSON, beyond any tool's schema; keeps what walks over it far from Python's own limit
)
# Variables that fields of their own set.
_RESERVED: Final = ("messages", "tools", "documents")


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """What a template sees.

    messages: keys that a message lacks are left out, since a None would be printed as ``None``. The arguments of calls
        are objects.
    tools, documents: None where there are none.
    arguments: further variables.
    texts_of_calls: for each message, the arguments of its calls as JSON text, for templates that want them so.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    documents: list[Any] | None
    arguments: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    texts_of_calls: list[list[str]]

    def texts(self) -> Iterator[str]:
        """Give every text of it, keys included."""
        for value in (self.messages, self.tools, self.documents, self.arguments, self.texts_of_calls):
            yield from _texts(value)

    def marked(self, mark: Callable[[str], str]) -> TemplateInput:
        """Return a copy whose texts, keys included, have been put through ``mark``."""
        return replace(
            self,
            messages=_mapped(self.messages, mark),
            tools=_mapped(self.tools, mark),
            documents=_mapped(self.documents, mark),
            arguments=_mapped(self.arguments, mark),
            texts_of_calls=_mapped(self.texts_of_calls, mark),
        )

    def with_texts_of_calls(self) -> TemplateInput:
        """Return a copy in which the arguments of calls are JSON text."""
        messages = []
        for message, texts in zip(self.messages, self.texts_of_calls, strict=True):
            if texts:
                calls = [
                    call | {"function": call["function"] | {"arguments": text}}
                    for call, text in zip(message["tool_calls"], texts, strict=True)
                ]
                message = message | {"tool_calls": calls}
            messages.append(message)
        return replace(self, messages=messages)


def read_input(prompt: ChatPrompt) -> TemplateInput:
    """Return what a template sees of a prompt. Raises InvalidRequestError with every bad field."""
    bad: list[FieldViolation] = []
    messages = [_message(m, f"{FIELD}.messages[{i}]", bad) for i, m in enumerate(prompt.messages)]
    tools = [_object(text, f"{FIELD}.tools[{i}]", bad) for i, text in enumerate(prompt.tools)]
    documents = [_object(text, f"{FIELD}.documents[{i}]", bad) for i, text in enumerate(prompt.documents)]
    arguments = {}
    if prompt.template_arguments is not None:
        arguments = _object(prompt.template_arguments, f"{FIELD}.template_arguments", bad)
    opened = _generation_prompt(arguments, prompt, bad)
    if prompt.continue_final_message and (not messages or messages[-1].get("content") in (None, [])):
        problem = "found no last message with content, expected one to go on with"
        bad.append(FieldViolation(f"{FIELD}.continue_final_message", problem))
    if bad:
        raise InvalidRequestError(bad)
    return TemplateInput(
        messages=messages,
        tools=tools or None,
        documents=documents or None,
        arguments=arguments,
        add_generation_prompt=opened,
        continue_final_message=prompt.continue_final_message,
        texts_of_calls=[[call.arguments or "{}" for call in m.tool_calls] for m in prompt.messages],
    )


def _generation_prompt(arguments: dict[str, Any], prompt: ChatPrompt, bad: list[FieldViolation]) -> bool:
    """Take ``add_generation_prompt`` out of the arguments and return whether an answer is opened."""
    field = f"{FIELD}.template_arguments"
    own = [name for name in _RESERVED if name in arguments]
    bad += [FieldViolation(field, f"found {name!r}, which has a field of its own") for name in own]
    opened: object = arguments.pop("add_generation_prompt", not prompt.continue_final_message)
    if not isinstance(opened, bool):
        bad.append(FieldViolation(field, f"add_generation_prompt is {opened!r}, expected true or false"))
        return True
    if opened and prompt.continue_final_message:
        problem = (
            "add_generation_prompt is true, which excludes continue_final_message; leave one of them out"
        )
        bad.append(FieldViolation(field, problem))
    return opened


def _message(message: ChatMessage, field: str, bad: list[FieldViolation]) -> dict[str, Any]:
    seen: dict[str, Any] = {"role": _text(message.role, f"{field}.role", bad)}
    if isinstance(message.content, tuple):
        parts = [_text(part, f"{field}.content_parts[{i}]", bad) for i, part in enumerate(message.content)]
        seen["content"] = [{"type": "text", "text": part} for part in parts]
    elif message.content is not None:
        seen["content"] = _text(message.content, f"{field}.content", bad)
    if message.name is not None:
        seen["name"] = _text(message.name, f"{field}.name", bad)
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        seen["tool_calls"] = [_call(call, f"{field}.tool_calls[{i}]", bad) for i, call in calls]
    if message.tool_call_id is not None:
        seen["tool_call_id"] = _text(message.tool_call_id, f"{field}.tool_call_id", bad)
    if message.reasoning_content is not None:
        reasoning = _text(message.reasoning_content, f"{field}.reasoning_content", bad)
        # Some templates know it by its older name.
        seen = {"thinking": reasoning, **seen, "reasoning_content": reasoning}
    return seen


def _call(call: ToolCall, field: str, bad: list[FieldViolation]) -> dict[str, Any]:
    arguments = _object(call.arguments or "{}", f"{field}.arguments", bad)
    function = {"name": _text(call.name, f"{field}.name", bad), "arguments": arguments}
    identity = {"id": _text(call.id, f"{field}.id", bad)} if call.id else {}
    return {**identity, "type": "function", "function": function}


def _object(text: str, field: str, bad: list[FieldViolation]) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except NOT_JSON as error:
        bad.append(FieldViolation(field, f"is not JSON ({error}); expected the text of an object"))
        return {}
    if not isinstance(value, dict):
        bad.append(FieldViolation(field, f"found {type(value).__name__}, expected the text of an object"))
        return {}
    if not _within(value, MAX_DEPTH):
        bad.append(FieldViolation(field, f"is nested more than {MAX_DEPTH} levels deep; expected less"))
        return {}
    return value


def _within(value: object, depth: int) -> bool:
    """Tell whether lists and objects are nested at most ``depth`` levels deep."""
    if not isinstance(value, (dict, list)):
        return True
    items = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_within(item, depth - 1) for item in items)


def _text(text: str, field: str, bad: list[FieldViolation]) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f"found a lone surrogate at character {error.start}, expected text that is valid Unicode"
        bad.append(FieldViolation(field, problem))
    return text


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _mapped(value: Any, mark: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, dict):
        return {mark(key): _mapped(item, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, mark) for item in value]
    return value
