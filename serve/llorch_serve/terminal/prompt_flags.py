"""Flags that say what a model is to continue: a text, token ids or a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from llorch_serve.errors import UsageError
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.requests import (
    ChatMessage,
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    ToolChoice,
    ToolMode,
)
from llorch_serve.terminal.groups import FlagGroup

MAX_TOOLS_BYTES: Final = 2**20
MAX_IDS_FILE_BYTES: Final = 64 * 2**20

PromptIds = Annotated[
    str | None,
    typer.Option(
        metavar="1,2,3|FILE",
        help="The prompt as token ids: numbers separated by commas, or a file with a JSON array of them.",
        show_default=False,
    ),
]


class PromptFlags(FlagGroup, frozen=True):
    """What is to be continued: a text, a user's message or token ids."""

    prompt: Annotated[str | None, typer.Option(help="Text to continue.", show_default=False)] = None
    chat: Annotated[
        str | None,
        typer.Option(help="A user's message, put through the model's chat template.", show_default=False),
    ] = None
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What the model is told before it chats.", show_default=False),
    ] = None
    tools: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --chat: a JSON list of the tools that may be called.",
            show_default=False,
        ),
    ] = None
    tool_choice: Annotated[
        str | None,
        typer.Option(
            metavar="none|auto|required|NAME",
            help="With --tools: whether one is called; NAME: this one. Calls are held by a grammar.",
            show_default=False,
        ),
    ] = None
    template_arguments: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Further variables of the chat template, like '{\"enable_thinking\": false}'.",
            show_default=False,
        ),
    ] = None
    prompt_ids: PromptIds = None

    def read(self) -> Prompt:
        """Return the one prompt that is given.

        Raises UsageError for none, several, ids that are none, files that cannot be read, and flags of a chat
        with another prompt.
        """
        given = [flag for flag in self.given() if flag in ("--prompt", "--chat", "--prompt-ids")]
        if len(given) != 1:
            raise UsageError(
                f"found {' and '.join(given) or 'no prompt'}; "
                f"give exactly one of --prompt, --chat, --prompt-ids"
            )
        if self.chat is not None:
            return self._conversation(self.chat)
        for flag in self.given():
            if flag not in given:
                raise UsageError(f"{flag} has no effect without --chat; leave it out")
        if self.prompt is not None:
            return TextPrompt(self.prompt)
        assert self.prompt_ids is not None
        return TokenPrompt(read_prompt_ids(self.prompt_ids))

    def _conversation(self, question: str) -> ChatPrompt:
        system = () if self.system is None else (ChatMessage("system", self.system),)
        if self.tool_choice is not None and self.tools is None:
            raise UsageError("--tool-choice has no effect without --tools; leave it out")
        return ChatPrompt(
            (*system, ChatMessage("user", question)),
            tools=() if self.tools is None else read_tools(self.tools),
            template_arguments=self.template_arguments,
            tool_choice=_read_choice(self.tool_choice),
        )


def _read_choice(choice: str | None) -> ToolChoice:
    """Return what ``--tool-choice`` asks for: a mode, or a tool by its name."""
    if choice in ("none", "auto", "required"):
        return ToolChoice(ToolMode(choice))
    return ToolChoice() if choice is None else ToolChoice(ToolMode.REQUIRED, (choice,))


def read_prompt_ids(value: str) -> tuple[int, ...]:
    """Return the token ids that ``--prompt-ids`` stands for: a list like ``1,2,3``, which may be empty, or
    the name of a file with a JSON array of them. A file whose name is a number is ``./NAME``.

    Raises UsageError for anything else.
    """
    parts = [part for part in value.split(",") if part.strip()]
    try:
        return tuple(map(int, parts))
    except ValueError:
        return _read_ids_file(value)


def _read_ids_file(name: str) -> tuple[int, ...]:
    expected = "expected numbers separated by commas, like 1,2,3, or a file with a JSON array of token ids"
    try:
        with Path(name).open("rb") as file:
            data = file.read(MAX_IDS_FILE_BYTES + 1)
        if len(data) > MAX_IDS_FILE_BYTES:
            raise UsageError(
                f"{name} has over {MAX_IDS_FILE_BYTES} bytes; expected a JSON array of token ids"
            )
        ids = msgspec.json.decode(data, type=tuple[int, ...])
    except OSError as error:
        raise UsageError(
            f"--prompt-ids is {name!r}, which cannot be read ({error.strerror}); {expected}"
        ) from error
    except NOT_JSON as error:
        raise UsageError(f"{name} is not a JSON array of token ids: {error}") from error
    if not ids:
        raise UsageError(f"{name} holds an empty array; at least one token id is needed")
    return ids


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
