"""Attacks by strangers: watches that take nothing, messages that are not meant to be read, and texts that
take long to tokenise.

Each has a worker of its own and one neighbour that asks it for a known answer again and again. Judged by:
health, the neighbour's answers, resident memory, and the end within the drain timeout. Beside health, that of
a bare server is told.

    ci/measurement chaos_strangers watches|messages|floods|texts ADDRESS SECONDS

attacks a worker that is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from llorch_serve.python_child import module_command
from llorch_serve.rpc import SERVICE_NAME, worker_pb2_grpc
from llorch_serve.rpc import worker_pb2 as pb
from measure.bare_health import bare_health
from measure.chaos_client import request
from measure.chaos_field import Row, Sizes
from measure.watching import Watched, watching
from support.harness.processes import PATIENCE_S, Running, running, with_scripts
from support.harness.raw_http2 import INITIAL_WINDOW_SIZE, PREFACE, begun, call, connected, headers, settings

GENERATE, CHECK, WATCH = (
    f"/{SERVICE_NAME}/Generate",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
)
TOKEN = "known"
MIB = 2**20
MEMORY_MIB = 512  # that strangers may make a worker take: docs/serving.md
ASKED = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
NO_WINDOW = PREFACE + settings({INITIAL_WINDOW_SIZE: 0})


def watches_that_take_nothing(artifact: Path, sizes: Sizes) -> Row:
    """Watches with a window of 0, from before readiness to the end, and a watcher that takes what it is
    told.
    """
    row = Row("Watch with a window of 0, from before SERVING to the end")
    with _starting(artifact) as (command, address), contextlib.ExitStack() as stack:
        stack.enter_context(_watching_nothing(address))
        channel = stack.enter_context(grpc.insecure_channel(address))
        heard = _Heard(channel)
        command.wait_for_line(r"^serving .* at")
        heard.wait_for(health_pb2.HealthCheckResponse.SERVING)
        with _neighbour(channel, sizes, row), _watched(address, command) as watched:
            row.times, _ = _attacked("watches", address, sizes)
        stack.enter_context(_watching_nothing(address))
        begun_at = time.monotonic()
        command.process.terminate()
        heard.wait_for(health_pb2.HealthCheckResponse.NOT_SERVING)
        told = time.monotonic() - begun_at
        code = command.wait()
        took = time.monotonic() - begun_at
    row.saw = (
        f"SERVING and NOT_SERVING told to another watcher, the latter {told:.1f} s after SIGTERM; "
        f"{_seen(watched)}; exit code {code} after {took:.1f} s"
    )
    row.lost += [] if code == 0 else ["its exit"]
    _judge(row, watched, sizes)
    return row


def messages_without_a_token(artifact: Path, sizes: Sizes) -> Row:
    """Calls without a token, and checks, of 15 MiB each."""
    row = Row("24 calls and 24 checks of 15 MiB without a token")
    _attack_without_token("messages", row, artifact, sizes)
    return row


def floods_without_a_token(artifact: Path, sizes: Sizes) -> Row:
    """Calls and checks by the thousand that send little or nothing and take nothing.

    Each call costs the event loop some processor time before it is refused, which no bound here takes away:
    what is judged is that health is answered at all, and memory; how long it took is told.
    """
    row = Row("16,000 calls and checks that send and take nothing, without a token")
    _attack_without_token("floods", row, artifact, dataclasses.replace(sizes, health_ms=math.inf))
    return row


def _attack_without_token(what: str, row: Row, artifact: Path, sizes: Sizes) -> None:
    with _starting(artifact) as (command, address), grpc.insecure_channel(address) as channel:
        command.wait_for_line(r"^serving .* at")
        with _neighbour(channel, sizes, row), _watched(address, command) as watched:
            row.times, statuses = _attacked(what, address, sizes)
        begun_at = time.monotonic()
        command.process.terminate()
        code = command.wait()
        took = time.monotonic() - begun_at
    told = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    row.saw = f"{told}; {_seen(watched)}; exit code {code} after {took:.1f} s"
    row.lost += [] if code == 0 else ["its exit"]
    row.lost += [status for status in statuses if status == "Generate OK"]
    _judge(row, watched, sizes)


def texts_that_take_long(artifact: Path, sizes: Sizes) -> Row:
    """Texts of 14 MiB to tokenise and chats of 7 MiB, of several kinds, from a caller with the token."""
    row = Row("texts of 14 MiB to tokenise, chats of 7 MiB")
    with _starting(artifact) as (command, address), grpc.insecure_channel(address) as channel:
        command.wait_for_line(r"^serving .* at")
        with _neighbour(channel, sizes, row), _watched(address, command) as watched:
            row.times, statuses = _attacked("texts", address, sizes)
        command.process.terminate()
        code = command.wait()
    told = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    row.saw = f"{told}; {_seen(watched)}; exit code {code}"
    row.lost += [] if code == 0 else ["its exit"]
    row.lost += [status for status in statuses if not status.endswith((" OK", " INVALID_ARGUMENT"))]
    _judge(row, watched, sizes)
    return row


def _attacked(what: str, address: str, sizes: Sizes) -> tuple[int, dict[str, int]]:
    """Attack from a process of its own, since health must not wait for the attacker's own work; return its
    rounds and what it was told.
    """
    arguments = module_command(sys.executable, "measure.chaos_strangers", what, address, str(sizes.attack_s))
    rounds, statuses = json.loads(
        subprocess.run(arguments, check=True, stdout=subprocess.PIPE, env=with_scripts()).stdout
    )
    return rounds, statuses


@contextlib.contextmanager
def _watching_nothing(address: str) -> Iterator[None]:
    """Hold 16 connections with 32 watches each, whose window is 0."""
    with contextlib.ExitStack() as stack:
        for _ in range(16):
            connection = stack.enter_context(connected(address, PATIENCE_S))
            with contextlib.suppress(OSError):
                calls = (call(WATCH, ASKED, stream) for stream in range(1, 65, 2))
                connection.sendall(NO_WINDOW + b"".join(calls))
        yield


def _watches(address: str, _statuses: Counter[str]) -> None:
    with _watching_nothing(address):
        time.sleep(0.2)  # a round that is held open: nothing can be waited for, since nothing is told


def _messages(address: str, statuses: Counter[str]) -> None:
    own = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(address, options=own)) for _ in range(24)]
        for path in (GENERATE, CHECK):
            asked = [
                channel.unary_unary(path).future(bytes(15 * MIB), timeout=PATIENCE_S) for channel in channels
            ]
            statuses.update(f"{path.rpartition('/')[2]} {one.code().name}" for one in asked)


def _floods(address: str, _statuses: Counter[str]) -> None:
    """Begin a thousand calls, or half as many checks, on each of 24 connections."""
    with contextlib.ExitStack() as stack:
        for flood in (
            b"".join(headers(GENERATE, stream) for stream in range(1, 2001, 2)),
            b"".join(begun(CHECK, 15 * MIB, stream, sent=bytes(50)) for stream in range(1, 1001, 2)),
            b"".join(call(CHECK, ASKED, stream) for stream in range(1, 1001, 2)),
        ):
            for _ in range(8):
                connection = stack.enter_context(connected(address, PATIENCE_S))
                with contextlib.suppress(OSError):
                    connection.sendall(NO_WINDOW + flood)


def _texts(address: str, statuses: Counter[str]) -> None:
    """Send what no context holds, and about as much as one holds, of what is hard to tokenise."""
    stub, sent = _stub_with_token(address), []
    for kind in (" ", "a", "\u4f60", "\uff21", "a, "):
        for size in (14 * MIB, 2 * MIB):
            text = kind * (size // len(kind.encode()))
            whole = pb.TokenizeRequest()
            whole.input.text = text
            chat = pb.GenerateRequest()
            chat.input.chat.messages.add(role="user", content=text[: len(text) // 2])
            chat.sampling.max_tokens = 1
            sent += [("Tokenize", stub.Tokenize.future(whole, timeout=PATIENCE_S))]
            sent += [("Generate", stub.Generate.future(chat, timeout=PATIENCE_S))]
            statuses.update(f"{name} {one.code().name}" for name, one in sent)
            sent.clear()


def _stub_with_token(address: str) -> Any:
    """Return a stub whose calls show the token and may be as large as they like."""

    class Shown(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        def intercept_unary_unary(self, continuation: Any, details: Any, asked: Any) -> Any:
            return continuation(details._replace(metadata=(("authorization", f"Bearer {TOKEN}"),)), asked)

    channel = grpc.insecure_channel(address, options=(("grpc.max_send_message_length", -1),))
    return worker_pb2_grpc.GenerationServiceStub(grpc.intercept_channel(channel, Shown()))


@contextlib.contextmanager
def _starting(artifact: Path) -> Iterator[tuple[Running, str]]:
    """Start a worker that asks for a token; yields it with its address as soon as it listens."""
    with running("serve", "--port", "0", artifact, LLORCH_API_TOKEN=TOKEN) as command:
        yield command, command.wait_for_line(r"^listening at (\S+), loading").group(1)


@contextlib.contextmanager
def _watched(address: str, command: Running) -> Iterator[Watched]:
    with bare_health() as control, watching(address, command.process.pid, control) as watched:
        yield watched


class _Heard:
    """What a watcher that takes everything is told."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._statuses: Any = health_pb2_grpc.HealthStub(channel).Watch(ASKED, timeout=PATIENCE_S)

    def wait_for(self, status: int) -> None:
        """Return once it is told that; raises RpcError if the watch ends before."""
        while next(self._statuses).status != status:
            pass


@contextlib.contextmanager
def _neighbour(channel: grpc.Channel, sizes: Sizes, row: Row) -> Iterator[None]:
    """Ask for the same answer again and again, at least once while the block runs; all must be what the first
    was.
    """
    over, answers = threading.Event(), list[list[int]]()
    stub = worker_pb2_grpc.GenerationServiceStub(channel)
    metadata = (("authorization", f"Bearer {TOKEN}"),)

    def ask() -> list[int]:
        asked = request(16, sizes.answer).request
        return list(stub.Generate(asked, timeout=PATIENCE_S, metadata=metadata).choices[0].token_ids)

    def again_and_again() -> None:
        while not over.is_set():
            try:
                answers.append(ask())
            except grpc.RpcError as error:
                row.lost.append(f"a neighbour's call ended with {error.code().name}: {error.details()}")

    alone = ask()
    thread = threading.Thread(target=again_and_again)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    row.lost += ["a neighbour's answer was another one"] * any(answer != alone for answer in answers)


def _seen(watched: Watched) -> str:
    times = [*watched.kept_ms, *watched.new_ms]
    return (
        f"resident memory {_grown(watched):+.0f} MiB at most; health: 99th percentile of {len(times)} "
        f"{_p99(times):.1f} ms, {_p99(watched.control_ms):.1f} of a bare server beside it"
    )


def _grown(watched: Watched) -> float:
    (_, before), *_ = watched.memory
    return (max(size for _, size in watched.memory) - before) / MIB


def _judge(row: Row, watched: Watched, sizes: Sizes) -> None:
    row.lost += [f"health said {unwell}" for unwell in watched.unwell]
    if (grown := _grown(watched)) > MEMORY_MIB:
        row.lost.append(f"memory grew by {grown:.0f} MiB, of {MEMORY_MIB}")
    if (p99 := _p99([*watched.kept_ms, *watched.new_ms])) > sizes.health_ms:
        row.lost.append(f"health took {p99:.0f} ms, of {sizes.health_ms:g}")


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[98] if len(times) > 1 else max(times)


STRANGERS = (
    watches_that_take_nothing,
    messages_without_a_token,
    floods_without_a_token,
    texts_that_take_long,
)


def main(what: str, address: str, seconds: float) -> None:
    """Attack in rounds for so long, once at least; print how many and what the attacker was told."""
    attack = {"watches": _watches, "messages": _messages, "floods": _floods, "texts": _texts}[what]
    statuses, rounds, until = Counter[str](), 0, time.monotonic() + seconds
    while rounds == 0 or time.monotonic() < until:
        attack(address, statuses)
        rounds += 1
    sys.stdout.write(json.dumps([rounds, statuses]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
