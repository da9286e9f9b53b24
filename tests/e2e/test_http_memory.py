"""What a body takes is given back once it has been read, and not only when its answer has ended."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from llorch_serve.observe.tap import ObservedGenerator
from llorch_serve.requests import Abort, ChatMessage, ChatPrompt, GenerationRequest, TextPrompt, UpdateSink
from support.fakes.generator import PATIENCE_S, FakeGenerator
from support.harness.http import Answer, running_front, send

MIB = 2**20
SIZE = 3 * MIB


class Forgetful(FakeGenerator):
    """Keeps nothing of a prompt, as a worker that has made tokens of it."""

    def submit(self, request: GenerationRequest, sink: UpdateSink) -> Abort:
        kept: Any = TextPrompt("Hi")
        if isinstance(request.prompt, ChatPrompt):
            kept = ChatPrompt((ChatMessage("user", "Hi"),))
        return super().submit(replace(request, prompt=kept), sink)


def padded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode() + b" " * SIZE


@contextlib.contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        tracemalloc.stop()


def held_at_last() -> tuple[int, int]:
    """Return what is held once that is little, or for as long as patience lasts, and the most that was."""
    deadline = time.monotonic() + PATIENCE_S / 4
    held, most = tracemalloc.get_traced_memory()
    while held > SIZE // 2 and time.monotonic() < deadline:
        held, most = tracemalloc.get_traced_memory()
    return held, most


LONG = "x" * SIZE
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES = {
    "a job": ("/v1/inference", padded({"prompt": "Hi", "max_tokens": 2})),
    "a job's prompt": ("/v1/inference", json.dumps({"prompt": LONG, "max_tokens": 2}).encode()),
    "a completion": ("/v1/completions", padded({"prompt": ["Hi", "Ho"], "max_tokens": 2})),
    "a prompt": ("/v1/completions", json.dumps({"prompt": LONG, "max_tokens": 2}).encode()),
    "a stream": ("/v1/completions", padded({"prompt": "Hi", "max_tokens": 2, "stream": True})),
    "a chat": ("/v1/chat/completions", padded({"messages": MESSAGES, "max_tokens": 2})),
    "a conversation": (
        "/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": LONG}], "max_tokens": 2}).encode(),
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_let_go_of_when_it_has_been_read(name: str) -> None:
    path, body = BODIES[name]
    inner = Forgetful(free_running=False)
    generator = ObservedGenerator(inner, [])
    answers: list[Answer] = []
    with running_front(generator) as front:
        asking = threading.Thread(target=lambda: answers.append(send(front.port, "POST", path, body)))
        with traced():
            asking.start()
            inner.wait_for(lambda g: g.live_ids)
            inner.submitted.clear()
            held, most = held_at_last()
        inner.run_freely()
        asking.join(PATIENCE_S)
    generator.close()
    assert answers[0].status == 200
    assert held < SIZE // 2 < SIZE < most


@pytest.mark.parametrize("path", ["/v1/inference", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "body", [b"\xff" * SIZE, padded({"temperature": 9, "prompt": "Hi", "max_tokens": 2})]
)
def test_a_refused_body_is_let_go_of(path: str, body: bytes) -> None:
    generator = FakeGenerator()
    with running_front(generator) as front, traced():
        for _ in range(3):
            assert send(front.port, "POST", path, body).status == 400
        held, most = held_at_last()
    generator.close()
    assert held < SIZE // 2 < SIZE < most
