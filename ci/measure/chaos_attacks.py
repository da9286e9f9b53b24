"""Attacks by clients on one worker, each a function from the ground and a number of times to a row of the
table.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import grpc
import psutil

from llorch_serve.python_child import module_command
from llorch_serve.rpc import SERVICE_NAME, worker_pb2_grpc
from llorch_serve.rpc import worker_pb2 as pb
from measure.chaos_client import request
from measure.chaos_field import SLOTS, Field, Row
from support.harness.processes import PATIENCE_S, with_scripts
from support.harness.raw_http2 import (
    CONTINUATION,
    DATA,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    RST_STREAM,
    call,
    connected,
    ends,
    frame,
    headers,
    settings,
)

STREAM = f"/{SERVICE_NAME}/GenerateStream"
MIB = 2**20
FLOOD = 2000

Victim = subprocess.Popen[bytes]


@contextlib.contextmanager
def victims(ground: Field, count: int, prompt_tokens: int) -> Iterator[list[Victim]]:
    """Client processes that are ready to ask."""
    command = module_command(sys.executable, "measure.chaos_client", ground.address)
    arguments = [*command, str(prompt_tokens), str(ground.sizes.endless)]
    started = [
        subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=with_scripts()
        )
        for _ in range(count)
    ]
    try:
        for victim in started:
            hear(victim, b"up")
        yield started
    finally:
        for victim in started:
            victim.kill()
            victim.communicate()


def hear(victim: Victim, word: bytes) -> None:
    """Wait until a client says so."""
    assert victim.stdout is not None
    assert victim.stdout.readline().strip() == word


def let_ask(victim: Victim, seed: int) -> None:
    """Have a client send its request."""
    assert victim.stdin is not None
    victim.stdin.write(f"{seed}\n".encode())
    hear(victim, b"asked")


def killed(moment: str, prompt: str) -> Callable[[Field, int], Row]:
    """Return the attack that kills clients (SIGKILL) at a moment of their requests' lives."""

    def attack(ground: Field, times: int) -> Row:
        chance = random.Random(7)
        length = ground.sizes.long_prompt if prompt == "long" else 16
        neighbours = SLOTS if moment == "queued" else SLOTS - 1
        row = Row(f"client killed: {moment}")
        with victims(ground, times, length) as ready, ground.attack(row, neighbours=neighbours, endless=True):
            for seed, victim in enumerate(ready, 1):
                let_ask(victim, seed)
                if moment == "queued":
                    ground.wait_for(lambda load: load.waiting > 0)
                elif moment == "in prefill":
                    ground.wait_for(lambda load: load.running == SLOTS)
                elif moment == "while decoding":
                    for _ in range(chance.randint(1, 20)):
                        hear(victim, b"token")
                else:
                    # Any moment: nothing can be waited for, so time alone decides.
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        victim.wait(chance.uniform(0.0, 1.0))
                victim.kill()
                row.freed_ms.append(ground.wait_for(lambda load: load.running + load.waiting <= neighbours))
                row.times += 1
        row.saw = "its slot or its place in the queue was free"
        return row

    return attack


def half_closed(ground: Field, times: int) -> Row:
    """Sockets whose clients will send no more, with nothing, half a call or a whole call sent."""
    ask = request(16, ground.sizes.endless)
    sent = {
        "nothing": b"",
        "a preface": PREFACE + settings(),
        "half a call": PREFACE + settings() + call(STREAM, ask, whole=False),
        "a call": PREFACE + settings() + call(STREAM, ask),
    }
    row, closed = Row("socket half-closed"), Counter[str]()
    with ground.attack(row, endless=True):
        for what, data in sent.items():
            for _ in range(times):
                with connected(ground.address, 10.0) as connection:
                    connection.sendall(data)
                    if what == "a call":
                        ground.wait_for(lambda load: load.running == SLOTS)
                    connection.shutdown(1)
                    closed[what] += ends(connection)
                    row.freed_ms.append(ground.wait_for(lambda load: load.running + load.waiting < SLOTS))
                row.times += 1
    row.saw = "the worker closed " + ", ".join(f"{closed[what]} after {what}" for what in sent)
    row.lost += [f"{what} stayed open" for what in sent if closed[what] < times]
    return row


def slow_readers(ground: Field, times: int) -> Row:
    """Clients that ask for a stream and take no byte of it."""
    row = Row("reader that takes nothing")
    ask = request(16, ground.sizes.answer)
    with ground.attack(row, neighbours=0), contextlib.ExitStack() as stack:
        wanted = ground.load().generated_tokens + times * ground.sizes.answer
        for _ in range(times):
            connection = stack.enter_context(connected(ground.address, PATIENCE_S))
            connection.sendall(PREFACE + settings({INITIAL_WINDOW_SIZE: 0}) + call(STREAM, ask))
            row.times += 1
        ground.wait_for(lambda load: load.generated_tokens >= wanted and load.running == load.waiting == 0)
        if ground.ask() != ground.alone:  # with all of them still connected
            row.lost.append("an answer beside them was another one")
    row.saw = (
        "answers generated to their end, slots free and a neighbour answered, with all of them still "
        "connected"
    )
    return row


def large_messages(ground: Field, times: int) -> Row:
    """Messages of 100 MB."""
    row, statuses, most = Row("message of 100 MB"), Counter[str](), 0
    process = psutil.Process(ground.pid)
    before = process.memory_info().rss
    message = pb.GenerateRequest(input=pb.Input(text="a" * (100 * MIB)))
    with ground.attack(row):
        for _ in range(times):
            options = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
            with grpc.insecure_channel(ground.address, options=options) as channel:
                future = worker_pb2_grpc.GenerationServiceStub(channel).Generate.future(
                    message, timeout=PATIENCE_S
                )
                statuses[future.code().name] += 1
                most = max(most, process.memory_info().rss)
            row.times += 1
    row.saw = f"{_counts(statuses)}; resident memory {(most - before) / MIB:+.0f} MiB at most"
    row.lost += [status for status in statuses if status != "RESOURCE_EXHAUSTED"]
    return row


def garbage(ground: Field, times: int) -> Row:
    """Bytes that are no frames, frames that are no call, and floods of those that are cheap to send."""
    chance = random.Random(3)
    start = PREFACE + settings()
    sent = [
        chance.randbytes(4096),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500),  # the start of TLS
        start + chance.randbytes(4096),
        start + frame(DATA, 0, 1, length=2**24 - 1) + bytes(2**16),
        start + frame(HEADERS, 4, 1, chance.randbytes(200)),
        start + frame(HEADERS, 4, 0, b""),
        start + headers(STREAM) + frame(DATA, 1, 1, b"\x01\xff\xff\xff\xff" + bytes(64)),
        start + headers(STREAM) + frame(DATA, 1, 1, b"\x00\x00\x00\x00\x40" + b"\xff" * 64),
        start + headers("/no.such.Service/Method") + frame(DATA, 1, 1, bytes(5)),
        start + frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, b"\x00\x01a\x01b") * FLOOD,
        start
        + b"".join(headers(STREAM, n) + frame(RST_STREAM, 0, n, bytes(4)) for n in range(1, 2 * FLOOD, 2)),
        start + frame(PING, 0, 0, bytes(8)) * FLOOD,
        start + settings() * FLOOD,
    ]
    row, closed = Row(f"garbage of {len(sent)} kinds, floods of {FLOOD:,} frames among them"), 0
    with ground.attack(row):
        for _ in range(times):
            for data in sent:
                with connected(ground.address, 10.0) as connection:
                    with contextlib.suppress(OSError):  # it hung up before all was sent
                        connection.sendall(data)
                        connection.shutdown(1)
                    closed += ends(connection)
                row.times += 1
    row.saw = f"the worker closed {closed} of {row.times} connections and answered its neighbours"
    if closed < row.times:
        row.lost.append("connections that stayed open")
    return row


def _counts(statuses: Counter[str]) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))


ATTACKS = (
    killed("queued", "short"),
    killed("in prefill", "long"),
    killed("while decoding", "short"),
    killed("at any moment", "long"),
    half_closed,
    slow_readers,
    large_messages,
    garbage,
)
