"""Roles that a template does not know: developers speak as the system where they must, and no message of an
unusual role is left out in silence.

Both are found out by rendering, as templates tell nobody which roles they know. Input: what a template sees,
and what renders it. Output: the same with roles that the template knows, or a refusal.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from llorch_serve.chat.template_input import FIELD, TemplateInput
from llorch_serve.errors import FieldViolation, InvalidRequestError

DEVELOPER: Final = "developer"
_SYSTEM: Final = "system"
# Every model's template was written with these in mind: what it leaves out of them, it means to.
_WELL_KNOWN: Final = ("system", "user", "assistant", "tool")
_MOST_SEARCHED: Final = 1024
"""Messages of unusual roles that are looked for in all of the text, since they do not stand where they
should.
"""
_MOST_TRIED: Final = 32
"""Those that are found nowhere, each of which takes a rendering of its own."""

Render = Callable[[TemplateInput], str]
"""Returns the text of a conversation, or raises InvalidRequestError."""


def with_known_roles(render: Render, seen: TemplateInput) -> TemplateInput:
    """Return a conversation whose developers speak as the system, unless the template knows developers.

    It knows them if it does anything else with them than with a role that nobody has ever heard of.
    """
    if all(message["role"] != DEVELOPER for message in seen.messages):
        return seen
    stranger = f"r{secrets.token_hex(8)}"
    known = _rendered(render, seen)
    unknown = _rendered(render, _with_role(seen, stranger))
    if known is None and unknown is None:
        return _with_role(seen, _SYSTEM)
    if known is None or unknown is None:
        return seen
    # A template may write the role in another case.
    same = unknown.casefold().replace(stranger, DEVELOPER) == known.casefold()
    return _with_role(seen, _SYSTEM) if same else seen


def check_all_told(render: Render, seen: TemplateInput, text: str, roles: list[str]) -> None:
    """Raise InvalidRequestError for a message of an unusual role that makes no difference to the text.

    text: the conversation, rendered. roles: of its messages, as they were sent.
    """
    end, searched, tried = 0, 0, 0
    for index, message in enumerate(seen.messages):
        if roles[index] in _WELL_KNOWN:
            continue
        said = [part.strip() for part in _texts(message.get("content")) if part.strip()]
        behind = _end_of(said, text, end)
        if behind is not None:
            end = behind
            continue
        searched += 1
        told = searched <= _MOST_SEARCHED and all(part in text for part in said)
        tried += not told
        if searched > _MOST_SEARCHED or tried > _MOST_TRIED:
            found = (
                f"the model's chat template changes too many messages of unusual roles, this one of the role "
                f"{roles[index][:32]!r}; expected at most {_MOST_TRIED} whose words it changes and "
                f"{_MOST_SEARCHED} out of order; send them as messages of a role that it knows, such as user"
            )
            raise InvalidRequestError([FieldViolation(f"{FIELD}.messages[{index}]", found)])
        if told:
            continue
        others = list(seen.messages)
        others[index] = message | {"content": f"CHANGED{secrets.token_hex(8)}"}
        if _rendered(render, replace(seen, messages=others)) == text:
            found = (
                f"the model's chat template leaves out messages of the role {roles[index][:32]!r}; send what "
                "it says as a message of a role that the template knows, such as user"
            )
            raise InvalidRequestError([FieldViolation(f"{FIELD}.messages[{index}]", found)])


def _end_of(parts: list[str], text: str, start: int) -> int | None:
    """Return where the last of some parts ends in a text, each of them behind the one before it; None: they
    are not there. Messages that are written in their order are so found in one pass.
    """
    for part in parts:
        at = text.find(part, start)
        if at < 0:
            return None
        start = at + len(part)
    return start


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        yield part["text"]


def _with_role(seen: TemplateInput, role: str) -> TemplateInput:
    messages = [
        message | {"role": role} if message["role"] == DEVELOPER else message for message in seen.messages
    ]
    return replace(seen, messages=messages)


def _rendered(render: Render, seen: TemplateInput) -> str | None:
    """Return the text of a conversation; None: the template refuses it."""
    try:
        return render(seen)
    except InvalidRequestError:
        return None
