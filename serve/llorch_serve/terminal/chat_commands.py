"""What begins with a slash in ``llorch chat``: each command changes the conversation and says what it did."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from llorch_serve.errors import UsageError
from llorch_serve.requests import ChatMessage, ModelInfo
from llorch_serve.terminal.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Reply:
    """What follows from a command: words for the user, a question to be asked again, or the end."""

    words: str = ""
    ask: str | None = None
    leave: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """A command; ``run`` takes what stands behind its name and may raise LlorchError."""

    usage: str
    help: str
    run: Callable[[Conversation, ModelInfo, str], Reply]


def run_command(line: str, conversation: Conversation, model: ModelInfo) -> Reply:
    """Carry out a line that begins with a slash. Raises LlorchError, in words for people."""
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise UsageError(
            f"there is no command /{name}; /help lists them. To begin a message with a slash, write //"
        )
    return command.run(conversation, model, argument.strip())


def _help(_conversation: Conversation, _model: ModelInfo, _argument: str) -> Reply:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:<{width}}  {command.help}" for command in COMMANDS.values()]
    keys = (
        "Enter sends; Alt-Enter, or a backslash at the end, begins a new line. Ctrl-C stops an answer, "
        "Ctrl-D leaves."
    )
    return Reply("\n".join([*lines, keys]))


def _system(conversation: Conversation, _model: ModelInfo, argument: str) -> Reply:
    if argument:
        conversation.system = None if argument == "none" else argument
    told = conversation.system
    return Reply("the model is told nothing beforehand" if told is None else f"the model is told: {told}")


def _reset(conversation: Conversation, _model: ModelInfo, _argument: str) -> Reply:
    conversation.reset()
    return Reply("forgotten")


def _undo(conversation: Conversation, _model: ModelInfo, _argument: str) -> Reply:
    question = conversation.take_back()
    return Reply("there is nothing to take back" if question is None else f"taken back: {question}")


def _regenerate(conversation: Conversation, _model: ModelInfo, _argument: str) -> Reply:
    question = conversation.take_back()
    return Reply("there is nothing to answer again") if question is None else Reply(ask=question)


def _set(conversation: Conversation, model: ModelInfo, argument: str) -> Reply:
    name, _, value = argument.partition(" ")
    if name and not value:
        raise UsageError(f"expected a value: /set {name} VALUE; none takes the default back")
    if name:
        conversation.set(name, value.strip(), vocab_size=model.vocab_size)
    changed = ", ".join(f"{key} {value}" for key, value in conversation.changed_settings().items())
    return Reply(f"set: {changed}" if changed else "all settings are the model's own")


def _save(conversation: Conversation, _model: ModelInfo, argument: str) -> Reply:
    if not argument:
        raise UsageError("expected a file name: /save FILE")
    document = [_document(message) for message in conversation.everything()]
    data = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    try:
        path = Path(argument).expanduser()
        # What was said may be private, and a file that is there is not to be lost.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # RuntimeError: the home of nobody; ValueError: a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{argument} cannot be written ({reason}); choose another name") from error
    return Reply(f"saved {len(document)} messages to {path}")


def _document(message: ChatMessage) -> dict[str, object]:
    found: dict[str, object] = {"role": message.role, "content": message.content}
    return found | ({"reasoning_content": message.reasoning_content} if message.reasoning_content else {})


def _leave(_conversation: Conversation, _model: ModelInfo, _argument: str) -> Reply:
    return Reply(leave=True)


COMMANDS: Final = {
    "help": Command("/help", "show this list", _help),
    "system": Command("/system [TEXT]", "what the model is told beforehand; none: nothing", _system),
    "set": Command("/set [NAME VALUE]", "how tokens are chosen, like: /set temperature 0.7", _set),
    "regenerate": Command("/regenerate", "answer the last question again", _regenerate),
    "undo": Command("/undo", "take the last question back", _undo),
    "reset": Command("/reset", "begin anew", _reset),
    "save": Command("/save FILE", "write the conversation as JSON", _save),
    "quit": Command("/quit", "leave", _leave),
}
