"""From a body of another API, translated to a chat, to a plan: the one that /v1/chat/completions makes.

Input: a :class:`ChatBody` and where its parts come from. Output: a plan whose errors name the fields as the
caller's own API has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from llorch_serve.calls.callers import Caller
from llorch_serve.errors import InvalidRequestError
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.http.openai_requests import plan_chat
from llorch_serve.http.openai_schema import ChatBody
from llorch_serve.http.service import AnswerPlan, Plan
from llorch_serve.http.translated.blocks import Findings
from llorch_serve.requests import ModelInfo

_MESSAGE: Final = re.compile(r"messages\[(\d+)\].*")


class Extras(msgspec.Struct, kw_only=True):
    """Fields beyond the schema of an API that is translated, as /v1/chat/completions has them too."""

    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    chat_template_kwargs: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)  # empty if absent


def extras(body: Extras, thinking: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """Return the extra fields of a body as keywords of a chat's.

    thinking: variables of the template that fields of the API's own set; those of ``chat_template_kwargs``
    count before them.
    """
    found = {field.name: getattr(body, field.name) for field in msgspec.structs.fields(Extras)}
    if thinking:
        try:
            given = msgspec.json.decode(bytes(body.chat_template_kwargs) or b"{}", type=dict[str, Any])
        except NOT_JSON as error:
            findings.refuse("chat_template_kwargs", f"{error}; expected an object")
            given = {}
        found["chat_template_kwargs"] = msgspec.Raw(msgspec.json.encode(thinking | given))
    return found


@dataclass(frozen=True, slots=True)
class FieldNames:
    """An API's own names for a chat's fields.

    messages: for each message, the name of what it was made from.
    beginnings: from beginnings of a chat's names to the API's; the first that fits counts.
    parameters: what a tool's schema is called.
    """

    messages: tuple[str, ...]
    beginnings: tuple[tuple[str, str], ...]
    parameters: str = "parameters"

    def own(self, field: str) -> str:
        """Return the API's name for a chat's."""
        found = _MESSAGE.fullmatch(field)
        if found is not None and int(found[1]) < len(self.messages):
            return self.messages[int(found[1])]
        if field.startswith("tools["):
            return field.replace(".function.parameters", f".{self.parameters}", 1).replace(".function", "", 1)
        for beginning, own in self.beginnings:
            if field.startswith(beginning):
                return own + field.removeprefix(beginning)
        return field


@dataclass(frozen=True, slots=True)
class Translation:
    """A body as a chat. ignored: fields that it has and that have no effect here, for the answer to tell."""

    chat: ChatBody
    names: FieldNames
    ignored: tuple[str, ...] = ()

    def plan(self, prefix: str, info: ModelInfo, caller: Caller, detail: Callable[[str], Any]) -> Plan:
        """Return the plan of the chat. prefix: of its id, which ``detail`` makes the answer's detail from.

        Raises InvalidRequestError or ModelMismatchError.
        """
        own = self.names.own  # and not the chat, which a plan must not keep
        try:
            plan = plan_chat(self.chat, info, caller, prefix)
        except InvalidRequestError as error:
            raise error.renamed(own) from error
        (request,) = plan.requests
        chat_names = plan.answer.names
        answer = AnswerPlan(
            plan.answer.stream, lambda field: own(chat_names(field)), detail(request.request_id)
        )
        return Plan((request,), answer)
