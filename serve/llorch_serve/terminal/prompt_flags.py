"""From the flags of ``llorch generate`` to a prompt: a text, token ids, or a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from llorch_serve.errors import UsageError
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.requests import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt

MAX_TOOLS_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class ChatFlags:
    """What a question may come with. system: what the model is told; tools: a file with a JSON list."""

    system: str | None = None
    tools: Path | None = None
    template_arguments: str | None = None

    def prompt(self, question: str) -> ChatPrompt:
        """Return the conversation. Raises UsageError if the file of tools cannot be read."""
        told = () if self.system is None else (ChatMessage("system", self.system),)
        return ChatPrompt(
            (*told, ChatMessage("user", question)),
            tools=() if self.tools is None else read_tools(self.tools),
            template_arguments=self.template_arguments,
        )

    def refuse(self) -> None:
        """Raise UsageError if any is set, where there is no chat."""
        flags: Mapping[str, object] = {
            "--system": self.system,
            "--tools": self.tools,
            "--template-arguments": self.template_arguments,
        }
        for name, value in flags.items():
            if value is not None:
                raise UsageError(f"{name} has no effect without --chat; leave it out")


def read_prompt(prompt: str | None, chat: str | None, prompt_ids: str | None, flags: ChatFlags) -> Prompt:
    """Return the one prompt that is given. Raises UsageError for none, several, or ids that are not numbers.

    flags: what a chat comes with; refused beside other prompts.
    """
    given = [
        name
        for name, value in (("--prompt", prompt), ("--chat", chat), ("--prompt-ids", prompt_ids))
        if value is not None
    ]
    if len(given) != 1:
        raise UsageError(
            f"found {' and '.join(given) or 'no prompt'}; give exactly one of --prompt, --chat, --prompt-ids"
        )
    if chat is not None:
        return flags.prompt(chat)
    flags.refuse()
    if prompt is not None:
        return TextPrompt(prompt)
    assert prompt_ids is not None
    try:
        return TokenPrompt(tuple(int(part) for part in prompt_ids.split(",") if part.strip()))
    except ValueError as error:
        raise UsageError(
            f"--prompt-ids is {prompt_ids!r}; expected numbers separated by commas, like 1,2,3"
        ) from error


def read_tools(path: Path) -> tuple[str, ...]:
    """Return the tools of a file, each as JSON text as it is written. Raises UsageError."""
    try:
        if path.stat().st_size > MAX_TOOLS_BYTES:
            raise UsageError(f"{path} has {path.stat().st_size} bytes; expected at most {MAX_TOOLS_BYTES}")
        data = path.read_bytes()
        tools = [str(memoryview(tool), "utf-8") for tool in msgspec.json.decode(data, type=list[msgspec.Raw])]
    except OSError as error:
        raise UsageError(f"--tools: {path} cannot be read ({error.strerror}); name a file") from error
    except NOT_JSON as error:
        raise UsageError(f"--tools: {path} holds no JSON list of tools ({error})") from error
    return tuple(tools)
