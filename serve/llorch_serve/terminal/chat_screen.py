"""Where the lines of ``llorch chat`` come from.

At a terminal prompt_toolkit reads them, with history, several lines and a status line below; otherwise they
are read from standard input as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from llorch_serve.terminal.chat_history import history_file, private_file
from llorch_serve.terminal.console import say
from llorch_serve.terminal.requirements import required

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

_PROMPT: Final = "> "


class LineReader(Protocol):
    """Gives what the user writes."""

    def read(self) -> str:
        """Return the next message or command. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C."""


class PlainReader:
    """Lines of standard input, for pipes."""

    def read(self) -> str:
        """Return the next line."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


class TerminalReader:
    """Lines of a terminal. status: the line below; keep_history: between runs, in a private file.

    Raises ProviderError, with the line that installs it, if prompt_toolkit is missing.
    """

    def __init__(self, status: Callable[[], str], *, keep_history: bool) -> None:
        with required("chat"):
            from prompt_toolkit import PromptSession
            from prompt_toolkit.history import FileHistory, History, InMemoryHistory
        history: History = InMemoryHistory()
        if keep_history:
            path = history_file()
            try:
                history = FileHistory(str(private_file(path)))
            except OSError as error:
                say(f"note: {path} cannot be written ({error.strerror}); history ends with this chat")
        self._session: PromptSession[str] = PromptSession(
            history=history,
            multiline=True,
            key_bindings=_bindings(),
            bottom_toolbar=lambda: status() or None,
            prompt_continuation="  ",
        )

    def read(self) -> str:
        """Return the next message, which may have several lines."""
        return self._session.prompt(_PROMPT)


def _bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
