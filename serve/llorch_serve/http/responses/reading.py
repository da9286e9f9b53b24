"""From the Responses API's bodies to chats, as /v1/chat/completions has them.

Input: the raw body, and the answers that are kept. Output: a plan. Items become messages in ``items.py``.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from llorch_serve.calls.callers import Caller
from llorch_serve.http.fields import read_struct, refuse_fields
from llorch_serve.http.openai_prompts import refuse
from llorch_serve.http.openai_schema import ChatBody, ContentPart, JsonSchemaFormat, Message, ResponseFormat
from llorch_serve.http.responses.items import add_items
from llorch_serve.http.responses.kept import KeptResponses, weight
from llorch_serve.http.responses.schema import (
    TOOLS,
    ChosenTools,
    FunctionTool,
    ResponsesBody,
    TextFormat,
)
from llorch_serve.http.responses.shape import Beginning, ResponseShape, echoed
from llorch_serve.http.service import Plan
from llorch_serve.http.translated.blocks import Findings, read_block
from llorch_serve.http.translated.conversation import Conversation
from llorch_serve.http.translated.planning import FieldNames, Translation, extras
from llorch_serve.requests import ModelInfo

THOUGHTS: Final = "reasoning.encrypted_content"
LOGPROBS: Final = "message.output_text.logprobs"
_OF_OTHER_TOOLS: Final = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""What may be asked to be told of tools and inputs that are not served here, so that there is none of it."""

_NAMES: Final = (
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("logprobs", "include"),
    ("messages", "input"),
)


def read_response(
    kept: KeptResponses, raw: bytes, info: ModelInfo, caller: Caller, ignored: list[str] | None = None
) -> Plan:
    """Return what a body of /v1/responses asks for. ignored: gets unknown fields, as in ``read_struct``.

    Raises InvalidRequestError or ModelMismatchError.
    """
    body = read_struct(raw, ResponsesBody, ignored)
    findings = Findings(unknown=ignored)
    _refuse_others(body, findings)
    known, size = _kept_messages(body, caller, kept, findings)
    conversation = Conversation(list(known), ["previous_response_id"] * len(known), fixed=len(known))
    if isinstance(body.input, str):
        conversation.add(Message("user", body.input), "input")
    else:
        add_items(body.input, conversation, findings, lambda name: kept.find_item(name, caller.owner))
    translation = _translate(body, conversation, findings)
    keeps = body.store and caller.identity is None  # the answers of a file are kept in one
    repeated, created = echoed(body) | {"store": keeps}, int(caller.now())
    wraps = THOUGHTS in (body.include or ())
    logprobs, model = bool(translation.chat.logprobs), body.model or info.names[0]
    added = tuple(map(_flat, conversation.messages[len(known) :]))
    beginning = Beginning(caller.owner, known + added, size + sum(map(weight, added)))

    def shape(response_id: str) -> ResponseShape:
        begins = [beginning] if keeps else []
        return ResponseShape(
            response_id, created, caller.now, model, repeated, wraps, logprobs, translation.ignored, begins
        )

    return translation.plan("resp_", info, caller, shape)


def _flat(message: Message) -> Message:
    """Return a message whose content is one text, as it is read in the end, to be kept."""
    if not isinstance(message.content, list):
        return message
    return msgspec.structs.replace(message, content="".join(part.text or "" for part in message.content))


def _refuse_others(body: ResponsesBody, findings: Findings) -> None:
    """Refuse what cannot be honoured unless it asks for nothing."""
    refuse(findings.bad, "background", body.background, (None, False))
    refuse(findings.bad, "context_management", body.context_management, (None, []))
    for name in ("conversation", "max_tool_calls", "moderation", "prompt"):
        refuse(findings.bad, name, getattr(body, name), (None,))
    refuse(findings.bad, "truncation", body.truncation, (None, "disabled"))
    if body.text is not None:
        refuse(findings.bad, "text.verbosity", body.text.verbosity, (None, "medium"))
    known = (THOUGHTS, LOGPROBS)
    for index, name in enumerate(body.include or ()):
        if name not in known and name not in _OF_OTHER_TOOLS and not findings.is_full:
            found = f"found {name[:100]!r}, expected one of {', '.join(known)}"
            findings.refuse(f"include[{index}]", found)


def _kept_messages(
    body: ResponsesBody, caller: Caller, kept: KeptResponses, findings: Findings
) -> tuple[tuple[Message, ...], int]:
    """Return the conversation of ``previous_response_id``, and its size in bytes."""
    name = body.previous_response_id
    if name is None:
        return (), 0
    found = kept.find(name, caller.owner)
    if found is None:
        expected = "answers are kept for an hour, within bounds, unless store is false"
        findings.refuse("previous_response_id", f"found {name[:100]!r}, which is not kept here; {expected}")
        return (), 0
    return found.messages, found.size


def _translate(body: ResponsesBody, conversation: Conversation, findings: Findings) -> Translation:
    tools = [
        _chat_tool(tool, path, findings)
        for path, raw in ((f"tools[{index}]", raw) for index, raw in enumerate(body.tools or ()))
        if not findings.is_full and (tool := read_block(raw, path, TOOLS, findings, optional=True))
    ]
    choice = _chat_choice(body.tool_choice)
    more = extras(body, _thinking(body, findings), findings)
    form = None if body.text is None or body.text.format is None else _chat_form(body.text.format)
    if findings.bad:
        refuse_fields(findings.bad)
    instructed = _with_instructions(body.instructions, conversation)
    chat = ChatBody(
        messages=instructed.messages,
        model=body.model,
        stream=body.stream,
        stream_options=body.stream_options,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=form,
        logprobs=LOGPROBS in (body.include or ()) or bool(body.top_logprobs),
        top_logprobs=body.top_logprobs,
        **more,
    )
    return Translation(chat, FieldNames(instructed.origins, _NAMES), findings.told)


def _with_instructions(instructions: str | None, conversation: Conversation) -> Conversation:
    """Return a conversation that begins with the instructions.

    Where the input itself begins with what a developer says, the two are one message: templates read the
    first alone as theirs, and some refuse a second.
    """
    if not instructions:
        return conversation
    parts = [ContentPart("text", instructions)]
    rest = 0
    for message in conversation.messages:
        told = message.content
        if message.role not in ("system", "developer") or told is None:
            break
        parts.append(ContentPart("text", "\n\n"))
        parts += [ContentPart("text", told)] if isinstance(told, str) else told
        rest += 1
    first = Message("system", parts if rest else instructions)
    return Conversation([first, *conversation.messages[rest:]], ["instructions", *conversation.places[rest:]])


def _chat_tool(tool: FunctionTool, path: str, findings: Findings) -> msgspec.Raw:
    """Return a tool as chats have it."""
    if tool.defer_loading:
        findings.ignored.append(f"{path}.defer_loading")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if bytes(tool.parameters) not in (b"", b"null"):
        function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return msgspec.Raw(msgspec.json.encode({"type": "function", "function": function}))


def _chat_choice(choice: str | ChosenTools | None) -> Any:
    """Return a chat's ``tool_choice``."""
    if not isinstance(choice, ChosenTools):
        return choice
    if choice.type == "function":
        return {"type": "function", "function": {"name": choice.name}}
    tools = [{"type": tool.type, "function": {"name": tool.name}} for tool in choice.tools or ()]
    return {"type": choice.type, choice.type: {"mode": choice.mode, "tools": tools}}


def _thinking(body: ResponsesBody, findings: Findings) -> dict[str, Any]:
    """Return the variables of the template that say whether and how hard to think."""
    if body.reasoning is None:
        return {}
    asked = [name for name in ("summary", "generate_summary") if getattr(body.reasoning, name) is not None]
    findings.ignored += [f"reasoning.{name}" for name in asked]
    effort = body.reasoning.effort
    if effort is None:
        return {}
    return {"enable_thinking": effort != "none", "reasoning_effort": effort}


def _chat_form(form: TextFormat) -> ResponseFormat:
    if form.type != "json_schema":
        return ResponseFormat(form.type)
    return ResponseFormat(form.type, JsonSchemaFormat(form.schema))
