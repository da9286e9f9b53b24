"""Files of requests, and OpenAI's client of their batches."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai

from llorch_serve.http.batches.settings import BatchSettings
from llorch_serve.http.settings import HttpSettings
from llorch_serve.http.unknown_fields import UnknownFields
from support.fakes.generator import PATIENCE_S, FakeGenerator
from support.harness.http import RunningFront, fake_front

SETTINGS = frozenset(BatchSettings.__dataclass_fields__)
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
CHAT = "/v1/chat/completions"


def front_of(
    folder: Path, *, unknown: UnknownFields = UnknownFields.REFUSE, **how: Any
) -> AbstractContextManager[tuple[RunningFront, FakeGenerator]]:
    """Return a front that keeps files in a folder. how: of the settings, and of the front."""
    chosen = {name: how.pop(name) for name in SETTINGS & how.keys()}
    settings = HttpSettings(unknown=unknown, batches=BatchSettings(folder, **chosen))
    return fake_front(settings=settings, **how)


def client_of(port: int, key: str = "none") -> openai.OpenAI:
    """Return a client that asks once."""
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S
    )


def chat_lines(count: int, url: str = CHAT, **body: Any) -> bytes:
    """Return a file of so many chats, with the ids a0, a1, ..."""
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3} | body
    lines = [{"custom_id": f"a{n}", "method": "POST", "url": url, "body": asked} for n in range(count)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def send_file(client: openai.OpenAI, content: bytes, name: str = "asked.jsonl") -> str:
    """Send a file; return its id."""
    return client.files.create(file=(name, content), purpose="batch").id


def begin(client: openai.OpenAI, content: bytes, **how: Any) -> Any:
    """Send a file and begin its batch."""
    asked = {"endpoint": CHAT, "completion_window": "24h"} | how
    return client.batches.create(input_file_id=send_file(client, content), **asked)


def drain(front: RunningFront) -> None:
    """Have a front do what a signal to stop has it do."""

    async def drained() -> None:
        await front.fronts.drain(asyncio.Event())

    front.on_loop(drained())


def wait_for(client: openai.OpenAI, batch_id: str, statuses: Collection[str] = ENDED) -> Any:
    """Ask for a batch until it has one of the statuses."""
    end = time.monotonic() + PATIENCE_S
    while (batch := client.batches.retrieve(batch_id)).status not in statuses:
        assert time.monotonic() < end, batch
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """Return the lines of a file of results, by custom_id; each is there once."""
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found
