"""Clients that leave at every moment and in every way, over gRPC and HTTP, and the account of what they leave
behind.

Their answers have no end of their own, save those whose last message a client waits for. So a request that
outlives its client stays live for ever, and is found however long the wait before it is looked for.

As a script: ``leaving_clients.py CLIENTS BUSY``: half of the clients over either, on one core beside so many
busy loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import os
import random
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llorch_serve.python_child import foreign_code_command
from llorch_serve.requests import Abort, GenerationRequest, UpdateSink
from llorch_serve.rpc import worker_pb2 as pb
from support.fakes.generator import PATIENCE_S, FakeGenerator
from support.harness import raw_http2 as http2
from support.harness.http import RunningFront, running_front

CLIENTS_AT_ONCE = 8
ENDLESS = 10**9
LONG = "long " * 3000  # one frame, and more work to admit
PATHS = tuple(f"/llorch.v1.GenerationService/{method}" for method in ("GenerateStream", "Generate"))

MOMENTS = (
    "before the headers",
    "in mid message",
    "after the message",
    "during admission",
    "admitted",
    "at the first message",
    "in mid stream",
    "at the last message",
    "while it reads nothing",
)
WAYS = ("cancel", "goaway", "close", "reset", "half-close")


class Watched(FakeGenerator):
    """Knows of each request when it is submitted and how it ended. Two run at once, the others wait."""

    def __init__(self) -> None:
        super().__init__(slots=2, capacity=1000, padding=200)
        self.begun: set[str] = set()
        self.ends: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def submit(self, request: GenerationRequest, sink: UpdateSink) -> Abort:
        with self._condition:
            self.begun.add(request.request_id)
            self._condition.notify_all()
        if len(request.prompt.text) == len(LONG):
            sum(range(200_000))
        self.submitted.clear()  # thousands of prompts
        return super().submit(request, sink)

    def _make_step(self) -> list[Any]:
        updates = super()._make_step()
        for update, _ in updates:
            if update.is_last and update.completion is not None:
                self.ends[update.request_id] += 1
                self.reasons[update.completion.reason.name] += 1
        return updates


class _Connection:
    """A connection whose frames are read one by one; it grants the server any window but for a stream that
    stalls.
    """

    def __init__(self, address: str, *, window: int = 2**30) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), PATIENCE_S)
        self._file = self.socket.makefile("rb")
        self.stream = 1
        wide = http2.frame(http2.WINDOW_UPDATE, payload=struct.pack(">I", 2**30))
        self.socket.sendall(http2.PREFACE + http2.settings({http2.INITIAL_WINDOW_SIZE: window}) + wide)

    def read(self, messages: int) -> None:
        """Read so many DATA frames of the present stream, or its end."""
        while messages:
            head = self._file.read(9)
            assert len(head) == 9, "the server closed the connection"
            kind, flags, stream = struct.unpack(">BBI", head[3:])
            payload = self._file.read(int.from_bytes(head[:3], "big"))
            if kind in (http2.SETTINGS, http2.PING) and not flags & http2.ACK:
                answer = payload if kind == http2.PING else b""
                self.socket.sendall(http2.frame(kind, http2.ACK, payload=answer))
            if stream == self.stream:
                if flags & http2.END_STREAM or kind == http2.RST_STREAM:
                    return
                messages -= kind == http2.DATA

    def close(self) -> None:
        self._file.close()
        self.socket.close()


def _leave(connection: socket.socket, way: str) -> None:
    if way == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif way == "half-close":
        with contextlib.suppress(OSError):  # the server may have closed it already
            connection.shutdown(socket.SHUT_WR)


class Leaving:
    """Sends clients to a server, and waits for each one's moment. left: how many have left, by moment and
    way.
    """

    def __init__(self, generator: Watched, *, rpc: str, http: int) -> None:
        self._generator = generator
        self._rpc, self._http = rpc, http
        self.left: Counter[tuple[str, str, str]] = Counter()

    def __call__(self, clients: int, ways_in: tuple[str, ...] = ("rpc", "http")) -> None:
        """Have so many clients come and leave. Raises what went wrong with the first of them."""
        every = itertools.cycle(itertools.product(MOMENTS, WAYS, ways_in))
        with ThreadPoolExecutor(CLIENTS_AT_ONCE) as pool:
            jobs = [
                pool.submit(self._visit, number, *one)
                for number, one in zip(range(clients), every, strict=False)
            ]
            for job in jobs:
                job.result()
        self._wait(lambda g: not g.live_ids)

    def _visit(self, number: int, moment: str, way: str, front: str) -> None:
        if front == "http" and way in ("cancel", "goaway"):
            way = "close"  # all that HTTP/1.1 has
        visit = self._visit_rpc if front == "rpc" else self._visit_http
        visit(f"{front} {number}", moment, way, random.Random(number))
        self.left[front, moment, way] += 1

    def _wait(self, happened: Callable[[Watched], object]) -> None:
        self._generator.wait_for(lambda _: happened(self._generator))

    def _until(self, name: str, moment: str, read: Callable[[int], None], chance: random.Random) -> None:
        """Wait for a client's moment, once its message is out."""
        if moment == "during admission":
            self._wait(lambda g: name in g.begun)
        elif moment in ("admitted", "while it reads nothing"):
            self._wait(lambda g: name in g.live_ids)
        elif moment == "at the first message":
            read(1)
        elif moment == "in mid stream":
            read(chance.randint(2, 20))
        elif moment == "at the last message":
            read(chance.randint(1, 4))

    def _visit_rpc(self, name: str, moment: str, way: str, chance: random.Random) -> None:
        connection = _Connection(self._rpc, window=0 if moment == "while it reads nothing" else 2**30)
        client = connection.socket
        streamed = "message" in moment or "stream" in moment or chance.random() < 0.5
        ends = moment == "at the last message"
        asked = pb.GenerateRequest(
            request_id=name,
            input=pb.Input(text=LONG if moment == "during admission" else "Hi"),
            sampling=pb.Sampling(max_tokens=3 if ends else ENDLESS, seed=1),
        )
        message = pb.GenerateStreamRequest(request=asked) if streamed else asked
        sent = http2.call(PATHS[0] if streamed else PATHS[1], message, connection.stream)
        if moment == "in mid message":
            sent = sent[: -chance.randint(1, 20)]
        if moment != "before the headers":
            client.sendall(sent)
            self._until(name, moment, connection.read, chance)
        if way == "cancel" and moment not in ("before the headers", "in mid message"):
            client.sendall(
                http2.frame(http2.RST_STREAM, 0, connection.stream, struct.pack(">I", 8))  # CANCEL
            )
        elif way == "goaway":
            client.sendall(http2.frame(http2.GOAWAY, payload=bytes(8)))
        _leave(client, way)
        if way in ("cancel", "half-close"):
            self._gone(name)
        connection.close()

    def _gone(self, name: str) -> None:
        """Wait until a client's request has ended, if it has begun, before its connection ends too."""
        self._wait(lambda g: name not in g.begun or g.ends[name])

    def _visit_http(self, name: str, moment: str, way: str, chance: random.Random) -> None:
        ends = moment == "at the last message"
        body: dict[str, Any] = {
            "prompt": LONG if moment == "during admission" else "Hi",
            "max_tokens": 3 if ends else ENDLESS,
        }
        if moment == "after the message" and chance.random() < 0.5:
            path, body = (
                "/v1/completions",
                body | {"prompt": ["Hi", LONG, "Ho"], "stream": chance.random() < 0.5},
            )
        else:
            path, body = "/v1/inference", body | {"job_id": name}
        raw = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
            f"{len(raw)}\r\n\r\n"
        )
        sent = head.encode() + raw
        client = socket.socket()
        if moment == "while it reads nothing":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE_S)
        client.connect(("127.0.0.1", self._http))
        file = client.makefile("rb")

        def read(messages: int) -> None:
            for line in file:
                messages -= line.startswith(b"event: token")
                if messages == 0 or line.startswith(b"data: [DONE]"):
                    return

        if moment == "in mid message":
            sent = sent[: -chance.randint(1, len(sent) - 1)]
        if moment != "before the headers":
            client.sendall(sent)
            self._until(name, moment, read, chance)
        _leave(client, way)
        file.close()
        if way == "half-close":
            self._gone(name)
        client.close()


async def nothing_remains(front: RunningFront) -> None:
    """Return once a worker holds nothing of its clients any more: no call, no request, no byte of one."""
    for desk in (front.rpc_desk, front.http_desk):
        await desk.wait_idle()
        while desk._calls._calls or desk._threads._pending_bytes:
            await asyncio.sleep(0)


def have_leave(clients: int) -> tuple[Leaving, Watched]:
    """Have so many clients leave a worker, half of them over either way in, and see that nothing remains of
    them.
    """
    generator = Watched()
    try:
        with running_front(generator) as front:
            leaving = Leaving(generator, rpc=front.rpc, http=front.port)
            leaving(clients)
            front.on_loop(nothing_remains(front))
            for desk in (front.rpc_desk, front.http_desk):
                assert not desk._calls._kept
    finally:
        generator.close()
    return leaving, generator


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep this process on one core, beside so many busy loops."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    children = [
        subprocess.Popen(foreign_code_command(sys.executable, "while True: pass")) for _ in range(loops)
    ]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()
        os.sched_setaffinity(0, cores)


def main(clients: int, loops: int) -> None:
    """Have clients leave on one core, and print how many left and how what they had begun has ended."""
    logging.basicConfig()
    with busy(loops):
        leaving, generator = have_leave(clients)
    gc.collect()
    left, read = leaving.left.total(), len(generator.begun)
    print(f"{left} clients left; {read} requests were read, and ended:")  # noqa: T201
    print(dict(generator.reasons), "more than once:", sum(count > 1 for count in generator.ends.values()))  # noqa: T201


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
