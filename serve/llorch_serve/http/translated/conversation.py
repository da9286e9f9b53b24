"""A chat's messages as they are put together from the parts of another API's body."""

from __future__ import annotations

from dataclasses import dataclass, field

from llorch_serve.http.openai_schema import Message


@dataclass(slots=True)
class Conversation:
    """Messages of a chat, and of each the name of what it was made from.

    fixed: how many of the first are another answer's, which nothing may be added to.
    """

    messages: list[Message] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    fixed: int = 0

    @property
    def origins(self) -> tuple[str, ...]:
        """The names, for errors."""
        return tuple(self.places)

    def add(self, message: Message, origin: str) -> None:
        """Take one more message."""
        self.messages.append(message)
        self.places.append(origin)
