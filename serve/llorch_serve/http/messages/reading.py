"""From Anthropic's bodies to chats, as /v1/chat/completions has them.

Input: the raw body. Output: a plan that generates, or the prompt whose tokens are to be counted. Blocks
become messages in ``turns.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from llorch_serve.calls.callers import Caller
from llorch_serve.http.fields import read_struct, refuse_fields
from llorch_serve.http.messages.schema import (
    TOOLS,
    CountBody,
    MessagesBody,
    MessagesTool,
    OutputFormat,
    ToolChoice,
)
from llorch_serve.http.messages.turns import read_turns
from llorch_serve.http.openai_prompts import refuse
from llorch_serve.http.openai_schema import ChatBody, JsonSchemaFormat, ResponseFormat
from llorch_serve.http.service import Plan
from llorch_serve.http.translated.blocks import Findings, read_block
from llorch_serve.http.translated.conversation import Conversation
from llorch_serve.http.translated.planning import FieldNames, Translation, extras
from llorch_serve.requests import ModelInfo

_NAMES: Final = (
    ("max_completion_tokens", "max_tokens"),
    ("stop_token_ids", "stop_token_ids"),
    ("stop", "stop_sequences"),
    ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
)
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class MessageShape:
    """What an answer says beside what was generated.

    stops: the caller's stop sequences. limit: most tokens that were asked for; None: as many as fit.
    ignored: fields of the body without effect.
    """

    message_id: str
    model: str
    stops: tuple[str, ...]
    limit: int | None
    ignored: tuple[str, ...]


def read_message(raw: bytes, info: ModelInfo, caller: Caller, ignored: list[str] | None = None) -> Plan:
    """Return what a body of /v1/messages asks for. ignored: gets unknown fields, as in ``read_struct``.

    Raises InvalidRequestError or ModelMismatchError.
    """
    body = read_struct(raw, MessagesBody, ignored)
    translation = _translate(
        body,
        ignored,
        max_completion_tokens=body.max_tokens,
        stream=body.stream,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
    )
    stops, limit, model = tuple(body.stop_sequences or ()), body.max_tokens, body.model or info.names[0]

    def shape(message_id: str) -> MessageShape:
        return MessageShape(message_id, model, stops, limit, translation.ignored)

    return translation.plan("msg_", info, caller, shape)


def read_count(raw: bytes, info: ModelInfo, caller: Caller, ignored: list[str] | None = None) -> Plan:
    """Return a plan whose prompt is the one that a body of /v1/messages/count_tokens is about. Raises as
    :func:`read_message` does.
    """
    translation = _translate(read_struct(raw, CountBody, ignored), ignored)
    return translation.plan("msg_", info, caller, lambda _: None)


def _translate(body: CountBody, unknown: list[str] | None, **sampling: Any) -> Translation:
    findings = Findings(unknown=unknown)
    refuse(findings.bad, "container", body.container, (None,))
    refuse(findings.bad, "mcp_servers", body.mcp_servers, (None, []))
    found = read_turns(body.system, body.messages, findings)
    tools = [
        _chat_tool(tool, path, findings.ignored)
        for path, raw in ((f"tools[{index}]", raw) for index, raw in enumerate(body.tools or ()))
        if not findings.is_full
        and (tool := read_block(raw, path, TOOLS, findings, default="custom", optional=True))
    ]
    choice, one_call = _read_choice(body.tool_choice, findings)
    more_fields = extras(body, _thinking(body, findings.ignored), findings)
    form, form_name = _read_form(body, findings)
    if body.context_management is not None:
        findings.ignored.append("context_management")
    if findings.bad:
        refuse_fields(findings.bad)
    chat = ChatBody(
        messages=found.messages,
        model=body.model,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=False if one_call else None,
        response_format=form,
        continue_final_message=_is_prefilled(found),
        **sampling,
        **more_fields,
    )
    forms = (("response_format.json_schema", form_name), ("response_format", form_name))
    names = FieldNames(found.origins, _NAMES + forms, "input_schema")
    return Translation(chat, names, findings.told)


def _is_prefilled(found: Conversation) -> bool:
    """Tell whether the answer goes on with a last message of the assistant's, as the API has it."""
    last = found.messages[-1] if found.messages else None
    return last is not None and last.role == "assistant" and bool(last.content) and not last.tool_calls


def _chat_tool(tool: MessagesTool, path: str, ignored: list[str]) -> msgspec.Raw:
    """Return a tool as chats have it; ``ignored`` gets what they have no place for."""
    if tool.defer_loading:
        ignored.append(f"{path}.defer_loading")
    if tool.input_examples:
        ignored.append(f"{path}.input_examples")
    if tool.allowed_callers not in (None, ["direct"]):
        ignored.append(f"{path}.allowed_callers")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return msgspec.Raw(msgspec.json.encode({"type": "function", "function": function}))


def _read_choice(choice: ToolChoice | None, findings: Findings) -> tuple[Any, bool]:
    """Return a chat's ``tool_choice``, and whether at most one call may be made."""
    if choice is None:
        return None, False
    if (choice.type == "tool") != (choice.name is not None):
        found = f"found type {choice.type} {'without' if choice.name is None else 'with'} a name"
        findings.refuse("tool_choice", f"{found}; type tool needs one, no other has one")
    one_call = bool(choice.disable_parallel_tool_use)
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}, one_call
    return _CHOICES[choice.type], one_call


def _thinking(body: CountBody, ignored: list[str]) -> dict[str, Any]:
    """Return the variables of the template that say whether and how hard to think."""
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
        unheld = [name for name in ("budget_tokens", "display") if getattr(body.thinking, name) is not None]
        ignored += [f"thinking.{name}" for name in unheld]
        if body.thinking.type == "between_tools":  # a template thinks or does not
            ignored.append("thinking.type")
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    return variables


def _read_form(body: CountBody, findings: Findings) -> tuple[ResponseFormat | None, str]:
    """Return the form that an answer is held to, and the name of the field that has it."""
    form: OutputFormat | None = None if body.output_config is None else body.output_config.format
    name = "output_config.format"
    if body.output_format is not None:
        if form is not None:
            findings.refuse("output_format", "found beside output_config.format; send only one")
        form, name = body.output_format, "output_format"
    if form is None:
        return None, name
    return ResponseFormat("json_schema", JsonSchemaFormat(form.schema)), name
