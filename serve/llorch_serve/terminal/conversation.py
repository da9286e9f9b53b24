"""A conversation at the terminal: what was said, what the model is told, and how its answers are chosen.

The loop of ``llorch chat`` and its commands change it; prompts for the model come out of it.
"""

from __future__ import annotations

import shlex
import typing
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Any, Final

import msgspec

from llorch_serve.errors import FieldViolation, InvalidRequestError, UsageError
from llorch_serve.requests import ChatMessage, ChatPrompt
from llorch_serve.sampling.params import SamplingParams

# What a value of a setting may be.
_SCALARS: Final = (int, float, bool)
_LISTS: Final = (tuple[str, ...], tuple[int, ...])
_NOT_SHOWN: Final = frozenset({"logprobs"})
"""What a conversation at a terminal does not show: it shows the text of an answer alone."""


@dataclass(slots=True)
class Conversation:
    """Messages without the system's, which is a field of its own.

    The last one is the user's only while an answer is due.
    """

    system: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    template_arguments: str | None = None
    messages: list[ChatMessage] = field(default_factory=list)

    def prompt(self) -> ChatPrompt:
        """Return everything as a prompt."""
        return ChatPrompt(tuple(self.everything()), template_arguments=self.template_arguments)

    def everything(self) -> list[ChatMessage]:
        """Return all messages, the system's first if there is one."""
        system = [] if self.system is None else [ChatMessage("system", self.system)]
        return system + self.messages

    def ask(self, text: str) -> None:
        """Add a question."""
        self.messages.append(ChatMessage("user", text))

    def answer(self, text: str, reasoning: str) -> None:
        """Add the answer to the last question; without any text the question is taken back."""
        if text or reasoning:
            self.messages.append(ChatMessage("assistant", text, reasoning_content=reasoning or None))
        else:
            self.take_back()

    def take_back(self) -> str | None:
        """Drop the last question and its answer; return the question, or None if there is none."""
        while self.messages:
            message = self.messages.pop()
            if message.role == "user":
                assert isinstance(message.content, str)
                return message.content
        return None

    def reset(self) -> None:
        """Forget what was said; the system's message is kept."""
        self.messages.clear()

    def set(self, name: str, value: str, *, vocab_size: int) -> None:
        """Change how tokens are chosen. ``none`` takes the default back. Raises UsageError."""
        kind = settings().get(name)
        if kind is None:
            raise UsageError(f"there is no setting {name!r}; expected one of {', '.join(settings())}")
        default = getattr(SamplingParams(), name)
        chosen: Any = default if value == "none" else _read(name, value, kind)
        changed = replace(self.sampling, **{name: chosen})
        found = changed.violations(vocab_size=vocab_size)
        bad = [v for v in found if v.field.removeprefix("sampling.").partition("[")[0] == name]
        if bad:
            raise InvalidRequestError(bad)
        self.sampling = changed

    def changed_settings(self) -> dict[str, object]:
        """Return the settings that are not the default, by name."""
        default = SamplingParams()
        found = {name: getattr(self.sampling, name) for name in settings()}
        return {name: value for name, value in found.items() if value != getattr(default, name)}


def settings() -> dict[str, Any]:
    """Return the types of what can be set at the terminal, by name: numbers, switches and lists."""
    hints = typing.get_type_hints(SamplingParams)
    return {
        name: hint
        for name, hint in hints.items()
        if _plain(hint) in (*_SCALARS, *_LISTS) and name not in _NOT_SHOWN
    }


def _plain(hint: Any) -> Any:
    """Return the type of a value that may also be None."""
    if isinstance(hint, UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else None
    return hint


def _read(name: str, value: str, kind: Any) -> Any:
    plain = _plain(kind)
    try:
        given = shlex.split(value) if plain in _LISTS else value
        return msgspec.convert(given, plain, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidRequestError([FieldViolation(name, f"found {value!r} ({error})")]) from error
