"""Conversations with tools, thoughts and results, each in the shapes of three APIs.

A conversation is made by chance from its number, so that every run has the same ones. Each API's body is
written from the plain turns by itself, as its clients write it.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

WORDS = ("rain", "Rome", "look", "it is", "Köln", "月", "no", "at 5", "&", "ok?")
NAMES = ("get_weather", "get_time", "add")


@dataclass(frozen=True)
class Call:
    """A call of a tool; arguments by name."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What somebody said. role: user or assistant. results: of the calls before it, by the call's id."""

    role: str
    text: str = ""
    thought: str = ""
    calls: tuple[Call, ...] = ()
    results: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Conversation:
    """What is sent, and what the model is to say then, as it writes it."""

    system: str
    tools: tuple[dict[str, Any], ...]
    turns: tuple[Turn, ...]
    answer: str = field(default="")

    def chat(self) -> dict[str, Any]:
        """Return the body for /v1/chat/completions."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages += [
                {"role": "tool", "tool_call_id": id_, "content": result} for id_, result in turn.results
            ]
            if turn.role == "user":
                messages += [{"role": "user", "content": turn.text}] if turn.text else []
                continue
            message: dict[str, Any] = {"role": "assistant", "content": turn.text or None}
            if turn.thought:
                message["reasoning_content"] = turn.thought
            if turn.calls:
                message["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                    }
                    for call in turn.calls
                ]
            messages.append(message)
        tools = [{"type": "function", "function": tool} for tool in self.tools]
        return {"messages": messages} | ({"tools": tools} if tools else {})

    def responses(self) -> dict[str, Any]:
        """Return the body for /v1/responses."""
        items: list[dict[str, Any]] = []
        for turn in self.turns:
            items += [
                {"type": "function_call_output", "call_id": id_, "output": result}
                for id_, result in turn.results
            ]
            if turn.thought:
                thought = {"type": "reasoning_text", "text": turn.thought}
                items.append({"type": "reasoning", "id": "rs", "summary": [], "content": [thought]})
            if turn.text:
                kind = "input_text" if turn.role == "user" else "output_text"
                items.append({"role": turn.role, "content": [{"type": kind, "text": turn.text}]})
            items += [
                {
                    "type": "function_call",
                    "call_id": call.id,
                    "name": call.name,
                    "arguments": json.dumps(call.arguments),
                }
                for call in turn.calls
            ]
        tools = [{"type": "function", **tool} for tool in self.tools]
        said = {"instructions": self.system} if self.system else {}
        return {"input": items} | said | ({"tools": tools} if tools else {})

    def messages(self) -> dict[str, Any]:
        """Return the body for /v1/messages."""
        messages = []
        for turn in self.turns:
            blocks: list[dict[str, Any]] = [
                {"type": "tool_result", "tool_use_id": id_, "content": result} for id_, result in turn.results
            ]
            if turn.thought:
                blocks.append({"type": "thinking", "thinking": turn.thought, "signature": "s"})
            if turn.text:
                blocks.append({"type": "text", "text": turn.text})
            blocks += [
                {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
                for call in turn.calls
            ]
            messages.append({"role": turn.role, "content": blocks})
        tools = [
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
            for tool in self.tools
        ]
        said = {"system": self.system} if self.system else {}
        return {"messages": messages} | said | ({"tools": tools} if tools else {})


def conversation(number: int, *, tools: bool = True) -> Conversation:
    """Return a conversation. tools: it may have some, and the answer calls of them."""
    chance = random.Random(number)

    def text(most: int = 4) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(1, most)))

    def calls(ids: str) -> tuple[Call, ...]:
        count = chance.choice((0, 1, 1, 2)) if offered else 0
        return tuple(
            Call(f"{ids}{index}", chance.choice(offered)["name"], {"a": chance.randint(0, 9), "b": text(1)})
            for index in range(count)
        )

    offered = [
        {"name": name, "description": text(2), "parameters": {"type": "object", "properties": {}}}
        for name in chance.sample(NAMES, chance.randint(0, len(NAMES)) if tools else 0)
    ]
    turns = [Turn("user", text())]
    for place in range(chance.randint(0, 2)):
        made = calls(f"call0000{place}")
        thought = text(2) if tools and chance.random() < 0.5 else ""
        turns.append(Turn("assistant", "" if made and chance.random() < 0.5 else text(), thought, made))
        results = tuple((call.id, text()) for call in made)
        turns.append(Turn("user", "" if results and chance.random() < 0.5 else text(), results=results))
    thought = f"<think>{text(3)}</think>" if tools and chance.random() < 0.5 else ""
    said = [
        f'<tool_call>{{"name": "{call.name}", "arguments": {json.dumps(call.arguments)}}}</tool_call>'
        for call in calls("")
    ]
    answer = thought + ("" if said and chance.random() < 0.3 else text()) + "".join(said)
    return Conversation(text() if chance.random() < 0.7 else "", tuple(offered), tuple(turns), answer)
