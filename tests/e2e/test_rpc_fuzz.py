"""Random messages over gRPC: whatever comes, the worker answers it or says what is wrong with it."""

from __future__ import annotations

import random
from pathlib import Path

import grpc

from fuzz.calls import RandomCalls
from fuzz.messages import random_bytes, random_message
from llorch_serve.rpc import worker_pb2 as pb
from support.harness.rpc import running_server
from support.harness.worker import make_session, make_worker

CALLS = 300


def test_messages_are_drawn_from_their_seed() -> None:
    kind = pb.GenerateRequest.DESCRIPTOR

    def drawn(seed: int) -> list[bytes]:
        rng = random.Random(seed)
        return [random_bytes(random_message(kind, rng), rng) for _ in range(20)]

    assert drawn(1) == drawn(1) != drawn(2)


def test_no_message_makes_an_internal_error(tmp_path: Path) -> None:
    worker = make_worker(tmp_path, make_session(context=256))
    try:
        with running_server(worker) as server, grpc.insecure_channel(server.address) as channel:
            calls = RandomCalls(channel, seed=0)
            findings = [
                f"{each.found}: {each.method} {each.raw.hex()}" for each in calls.run(lambda n: n < CALLS)
            ]
            assert findings == []
            for method in ("Generate", "GenerateStream", "Tokenize", "Score"):
                assert calls.statuses[f"{method} OK"] > 3  # or nothing has been tried but refusals
                assert calls.statuses[f"{method} INVALID_ARGUMENT"] > 3
            assert calls.plain_call_works()
    finally:
        worker.close()
