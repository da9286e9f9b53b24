"""From a chat prompt to the plain values that a template sees: dicts, lists, texts and numbers, as
transformers gives them.

The prompt comes from a request and is checked here; values go to the chat module, which renders them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from llorch_serve.chat.tools import choice_violations, shown_tools
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.requests import ChatMessage, ChatPrompt, ToolCall

FIELD: Final = "input.chat"
MAX_DEPTH: Final = (
    64  # of JSON, beyond any tool's schema; keeps what walks over it far from Python's own limit
)
MAX_ITEMS: Final = 2**16  # of JSON: tools, documents, arguments and calls together
# Variables that fields of their own set.
_RESERVED: Final = ("messages", "tools", "documents")
_NEED_NO_CONTENT: Final = ("assistant", "tool")
_WORD: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """What a template sees.

    messages: keys that a message lacks are left out, since a None would be printed as ``None``. The arguments
        of calls are objects.
    tools, documents: None where there are none.
    arguments: further variables.
    texts_of_calls: for each message, the arguments of its calls as JSON text, for templates that want them
        so.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    documents: list[Any] | None
    arguments: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    texts_of_calls: list[list[str]]

    def changed(self, value: Callable[[str], str], key: Callable[[str], str]) -> TemplateInput:
        """Return a copy in which every text of the user has been put through ``value``, and keys of their
        objects through ``key``.

        A role that is a word stays: it says what a message is, and templates write it into their own tokens.
        """
        return replace(
            self,
            messages=[_changed_message(message, value, key) for message in self.messages],
            tools=_mapped(self.tools, value, key),
            documents=_mapped(self.documents, value, key),
            arguments=_mapped(self.arguments, value, key),
            texts_of_calls=_mapped(self.texts_of_calls, value, key),
        )

    def texts(self) -> list[str]:
        """Return every text of the user."""
        found: list[str] = []

        def noted(text: str) -> str:
            found.append(text)
            return text

        self.changed(noted, noted)
        return found

    def forms(self) -> Iterator[TemplateInput]:
        """Yield the forms that templates take a conversation in, the commonest first.

        They differ in what stands for an answer's content where it has none, and in the arguments of calls,
        which are objects or JSON text.
        """
        forms = [self.messages]
        if any(map(_has_no_content, self.messages)):
            # Some write calls only beside none, and what stands there without calls is an empty text.
            forms.append([_filled(m, None if "tool_calls" in m else "") for m in self.messages])
            forms.append([_filled(m, "") for m in self.messages])
        for messages in forms:
            form = replace(self, messages=messages)
            yield form
            if any(self.texts_of_calls):
                yield form.with_texts_of_calls()

    def calls_without_content(self) -> list[str]:
        """Return the functions' names of calls in messages that say nothing else."""
        silent = [message for message in self.messages if _has_no_content(message)]
        return [call["function"]["name"] for message in silent for call in message.get("tool_calls", ())]

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


def _has_no_content(message: dict[str, Any]) -> bool:
    """Tell whether a message need have no content, and has none."""
    content = message.get("content")
    calls = "tool_calls" in message
    return (message["role"] in _NEED_NO_CONTENT and content is None) or (calls and content == "")


def _filled(message: dict[str, Any], content: str | None) -> dict[str, Any]:
    return message | {"content": content} if _has_no_content(message) else message


def read_input(prompt: ChatPrompt) -> TemplateInput:
    """Return what a template sees of a prompt. Raises InvalidRequestError with every bad field."""
    bad: list[FieldViolation] = []
    _check_items(prompt)
    messages = [_message(m, f"{FIELD}.messages[{i}]", bad) for i, m in enumerate(prompt.messages)]
    tools = [_object(text, f"{FIELD}.tools[{i}]", bad) for i, text in enumerate(prompt.tools)]
    bad += choice_violations(prompt)
    shown = frozenset(shown_tools(prompt))
    tools = [tool for tool, text in zip(tools, prompt.tools, strict=True) if text in shown]
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
        texts_of_calls=[[_text_of_arguments(call) for call in m.tool_calls] for m in prompt.messages],
    )


def _check_items(prompt: ChatPrompt) -> None:
    """Raise InvalidRequestError before JSON is read that has too many values: while it is, nothing else
    runs.
    """
    calls = [call.arguments for message in prompt.messages for call in message.tool_calls]
    texts = (*prompt.tools, *prompt.documents, prompt.template_arguments or "", *calls)
    found = sum(text.count(mark) for text in texts for mark in "[{,")
    if found > MAX_ITEMS:
        problem = f"found {found} commas and opening brackets in JSON together, expected at most {MAX_ITEMS}"
        raise InvalidRequestError([FieldViolation(FIELD, problem)])


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
    arguments = _object(_text_of_arguments(call), f"{field}.arguments", bad)
    function = {"name": _text(call.name, f"{field}.name", bad), "arguments": arguments}
    identity = {"id": _text(call.id, f"{field}.id", bad)} if call.id else {}
    return {**identity, "type": "function", "function": function}


def _text_of_arguments(call: ToolCall) -> str:
    """Return a call's arguments; a tool without parameters is called without, or with null."""
    return "{}" if call.arguments.strip() in ("", "null") else call.arguments


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


def _changed_message(
    message: dict[str, Any], value: Callable[[str], str], key: Callable[[str], str]
) -> dict[str, Any]:
    changed = {name: _mapped(item, value, key) for name, item in message.items()}
    if _WORD.fullmatch(message["role"]):
        changed["role"] = message["role"]
    if isinstance(message.get("content"), list):
        changed["content"] = [part | {"text": value(part["text"])} for part in message["content"]]
    if "tool_calls" in message:
        changed["tool_calls"] = [_changed_call(call, value, key) for call in message["tool_calls"]]
    return changed


def _changed_call(
    call: dict[str, Any], value: Callable[[str], str], key: Callable[[str], str]
) -> dict[str, Any]:
    function = {name: _mapped(item, value, key) for name, item in call["function"].items()}
    identity = {"id": value(call["id"])} if "id" in call else {}
    return call | identity | {"function": function}


def _mapped(item: Any, value: Callable[[str], str], key: Callable[[str], str]) -> Any:
    """Return a copy of JSON's values with texts and keys changed."""
    if isinstance(item, str):
        return value(item)
    if isinstance(item, dict):
        return {key(name): _mapped(inner, value, key) for name, inner in item.items()}
    if isinstance(item, list):
        return [_mapped(inner, value, key) for inner in item]
    return item
