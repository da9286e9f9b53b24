"""Prompts of bodies that generate nothing: conversations as /v1/chat/completions has them.

Used by ``token_routes.py`` and ``score_routes.py``, and where tokens are counted for other APIs.
"""

from __future__ import annotations

import msgspec

from llorch_serve.calls.callers import Caller
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.http.openai_requests import plan_chat
from llorch_serve.http.openai_schema import ChatBody, Message
from llorch_serve.http.service import Plan
from llorch_serve.requests import GenerationRequest, ModelInfo, Prompt, TextGenerator


class ConversationBody(msgspec.Struct, kw_only=True):
    """A conversation in place of a text, and what the template is told beside it. Absent and null are the
    same.
    """

    model: str | None = None
    messages: list[Message] | None = None
    tools: list[msgspec.Raw] | None = None
    chat_template_kwargs: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)  # empty if absent
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


def read_conversation(body: ConversationBody, info: ModelInfo, caller: Caller) -> Prompt:
    """Return the conversation of a body that has one. Raises InvalidRequestError or ModelMismatchError."""
    names = msgspec.structs.asdict(body)
    chat = {name: names[name] for name in ConversationBody.__struct_fields__}
    return prompt_of(plan_chat(ChatBody(**chat), info, caller))


def prompt_of(plan: Plan) -> Prompt:
    """Return the prompt of a plan that would generate from one."""
    (request,) = plan.requests
    assert isinstance(request, GenerationRequest)
    return request.prompt


def count_tokens(plan: Plan, generator: TextGenerator) -> int:
    """Return how many tokens the prompt of such a plan has. Raises InvalidRequestError, which names fields as
    the body does.
    """
    try:
        return len(generator.tokenize(prompt_of(plan))[0])
    except InvalidRequestError as error:
        raise error.renamed(plan.answer.names) from error


def choose_one(body: ConversationBody, name: str, value: object) -> None:
    """Raise InvalidRequestError unless a body has either the field ``name`` or messages."""
    if (value is None) == (body.messages is None):
        found = "nothing" if value is None else f"{name} and messages"
        problem = f"found {found}, expected one of {name} and messages"
        raise InvalidRequestError([FieldViolation(name, problem)])


def own_name(field: str, prompt: str) -> str:
    """Return the name that a body has for a field of a generator's prompt. prompt: of the text."""
    field = field.removeprefix(f"{prompt}.").removeprefix("input.")
    if field.startswith("chat.template_arguments"):
        return "chat_template_kwargs"
    if field.startswith("chat."):
        return field.removeprefix("chat.")
    return prompt if field in ("input", "text", "tokens") or field.startswith("tokens.") else field
