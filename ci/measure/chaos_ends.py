"""Attacks that end a worker, or that it must end well under: SIGTERM under load, and a pool manager that is
not there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc import worker_pb2_grpc
from measure.chaos_client import request
from measure.chaos_field import SLOTS, Row, Sizes, ask
from support.fakes.pool_manager import Manager
from support.harness.processes import PATIENCE_S, serving

CLIENTS = 2 * SLOTS


def terminated(drain_s: float, *, finishing: bool) -> Callable[[Path, Sizes], Row]:
    """Return the attack that sends SIGTERM to a worker with twice as many streams as slots.

    finishing: their answers are short enough for the drain timeout, so that all must be whole; else none can
        be.
    """

    def attack(artifact: Path, sizes: Sizes) -> Row:
        answer = sizes.answer if finishing else sizes.endless
        row, outcomes, refused = (
            Row(f"SIGTERM under load, --drain-timeout {drain_s:g}", CLIENTS),
            Counter[str](),
            "",
        )
        flags = (
            "--slots",
            SLOTS,
            "--drain-timeout",
            drain_s,
            "--max-context",
            sizes.endless + sizes.long_prompt,
        )
        with serving(artifact, *flags) as worker, grpc.insecure_channel(worker.address) as channel:
            stub = worker_pb2_grpc.GenerationServiceStub(channel)
            streams: list[Any] = [stub.GenerateStream(request(16, answer, seed=n)) for n in range(CLIENTS)]
            while (load := stub.GetLoad(pb.GetLoadRequest())).running + load.waiting < CLIENTS:
                pass
            worker.command.process.terminate()
            begun = time.monotonic()
            while not refused:
                try:
                    stub.Generate(request(16, 1).request, timeout=PATIENCE_S)
                except grpc.RpcError as error:
                    refused = error.code().name
            for stream in streams:
                outcomes[_outcome(stream, answer)] += 1
            code = worker.command.wait()
            took = time.monotonic() - begun
        wanted = "whole" if finishing else "UNAVAILABLE"
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        row.saw = f"{told}; a new call {refused}; exit code {code} after {took:.1f} s"
        row.lost += [outcome for outcome in outcomes if outcome != wanted]
        row.lost += [] if (code, refused) == (0, "UNAVAILABLE") else ["its exit"]
        return row

    return attack


def _outcome(stream: Any, answer: int) -> str:
    tokens, completed = 0, False
    try:
        for response in stream:
            tokens += len(response.token_ids)
            completed = response.HasField("completion")
    except grpc.RpcError as error:
        return str(error.code().name)
    return "whole" if completed and tokens == answer else "cut short without a status"


def without_manager(artifact: Path, sizes: Sizes) -> Row:
    """A manager that is down at the start, comes, dies, comes back, and is down at the end."""
    row = Row("pool manager down", 3)
    with Manager() as manager:
        port = manager.port
    flags = ("--callback-url", manager.url, "--worker-id", "w")
    with serving(artifact, *flags) as worker, grpc.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.GenerationServiceStub(channel)
        worker.command.wait_for_line("ready did not reach the pool manager")
        alone = ask(stub, sizes)
        begun = time.monotonic()
        with Manager(port=port) as manager:
            manager.next("ready")
            told = time.monotonic() - begun
        if ask(stub, sizes) != alone:
            row.lost.append("an answer without a manager was another one")
        begun = time.monotonic()
        worker.command.process.terminate()
        code = worker.command.wait()
        took = time.monotonic() - begun
    row.saw = (
        f"served without it; told it ready {told:.1f} s after it came; exit code {code} {took:.1f} s after "
        f"SIGTERM"
    )
    row.lost += [] if code == 0 else ["its exit"]
    return row


ENDS = (terminated(30.0, finishing=True), terminated(0.5, finishing=False), without_manager)
