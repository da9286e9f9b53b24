"""The loop of ``llorch chat``: a line in, a command or an answer out, until the user leaves.

Ctrl-C ends the answer under way, whose text so far stays part of the conversation, or drops the line being
written; it never ends the program. A refused request is told and taken back, and the chat goes on.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from llorch_serve.errors import LlorchError
from llorch_serve.requests import Completion, GenerationRequest, GenerationUpdate, ModelInfo
from llorch_serve.terminal.chat_commands import run_command
from llorch_serve.terminal.chat_screen import LineReader
from llorch_serve.terminal.console import RED, show_aside, write
from llorch_serve.terminal.conversation import Conversation

Generate = Callable[[GenerationRequest], Iterator[GenerationUpdate]]
"""Gives the updates of a request; closing it early ends the request."""


@dataclass(slots=True)
class ChatLoop:
    """A chat with one model."""

    conversation: Conversation
    model: ModelInfo
    generate: Generate
    _last: Completion | None = field(default=None, init=False)

    def run(self, reader: LineReader) -> None:
        """Go on until the user leaves."""
        while True:
            try:
                line = reader.read()
                if not self._handle(line):
                    return
            except EOFError:
                return
            except KeyboardInterrupt:
                show_aside("(Ctrl-D leaves)")
            except LlorchError as error:
                show_aside(str(error), RED)

    def status(self) -> str:
        """Return what the status line says: model, context in use, speed of the last answer."""
        parts = [self.model.model_id]
        if (last := self._last) is not None:
            used = last.prompt_tokens + last.generated_tokens
            parts.append(f"{used} of {self.model.context_length} tokens")
            parts.append(_speed(last))
        return " | ".join(parts)

    def _handle(self, line: str) -> bool:
        """Answer a line; return whether the chat goes on."""
        question: str | None = line
        if line.startswith("//"):
            question = line[1:]
        elif line.startswith("/"):
            reply = run_command(line, self.conversation, self.model)
            if reply.words:
                show_aside(reply.words)
            if reply.leave:
                return False
            question = reply.ask
        if question is not None and question.strip():
            self._answer(question)
        return True

    def _answer(self, question: str) -> None:
        conversation = self.conversation
        conversation.ask(question)
        answer = _Answer()
        try:
            request = GenerationRequest(str(uuid.uuid4()), conversation.prompt(), conversation.sampling)
            updates = self.generate(request)
            try:
                for update in updates:
                    answer.add(update)
            finally:
                _close(updates)
        except KeyboardInterrupt:
            answer.end_line()
            show_aside("(stopped)")
        finally:
            # Whatever happened: what was shown is part of the conversation, a question without answer is not.
            conversation.answer(answer.text, answer.reasoning)
        if answer.completion is not None:
            answer.end_line()
            self._last = answer.completion
            limit = "; ended by the limit of tokens" if answer.completion.reason.value == "length" else ""
            show_aside(f"{answer.completion.generated_tokens} tokens, {_speed(answer.completion)}{limit}")


@dataclass(slots=True)
class _Answer:
    """An answer as it comes, on the screen."""

    text: str = ""
    reasoning: str = ""
    completion: Completion | None = None

    def add(self, update: GenerationUpdate) -> None:
        if update.reasoning:
            self.reasoning += update.reasoning
            show_aside(update.reasoning, end="")
        if update.text:
            if self.reasoning and not self.text:
                show_aside("")
            self.text += update.text
            write(update.text)
        self.completion = update.completion

    def end_line(self) -> None:
        if self.text and not self.text.endswith("\n"):
            write("\n")
        elif self.reasoning and not self.text:
            show_aside("")


def _close(updates: Iterator[GenerationUpdate]) -> None:
    close = getattr(updates, "close", None)
    if close is not None:
        close()


def _speed(completion: Completion) -> str:
    """Return the tokens per second after the first one."""
    after_first = completion.generated_tokens - 1
    seconds = completion.timings.decode_s
    return f"{after_first / seconds:.1f} tokens/s" if after_first > 0 and seconds > 0 else "too short to time"
