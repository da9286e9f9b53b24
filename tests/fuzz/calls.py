"""Random calls of a running worker over gRPC: ``python -m fuzz.calls HOST:PORT --seconds N``.

Whatever is sent, the worker answers it or says what is wrong with it: INTERNAL, UNKNOWN and DATA_LOSS are
findings, and so is a call that hangs, and a worker that does not answer a plain call at the end. A finding
ends the run with 1; its method and bytes are printed, and sent again by ``--seed`` and ``--skip``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc

from fuzz.messages import random_bytes, random_message
from llorch_serve.rpc import worker_pb2 as pb

CALL_S: Final = 60.0
"""After which a call that has not ended hangs; those that make tokens are cancelled sooner, by themselves."""

STREAM_S: Final = 2.0
FINDINGS: Final = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["GenerationService"]
_MAKE_TOKENS: Final = ("Generate", "GenerateStream", "Score")


@dataclass(frozen=True, slots=True)
class Finding:
    """A call that the worker did not answer as it should. number: of the run's calls, from 0."""

    number: int
    method: str
    raw: bytes
    found: str


class RandomCalls:
    """Calls of one worker, drawn from a seed. statuses: how many ended how."""

    def __init__(self, channel: grpc.Channel, seed: int) -> None:
        self._channel = channel
        self._rng = random.Random(seed)
        self.statuses: Counter[str] = Counter()
        self.count = 0

    def run(self, may_go_on: Callable[[int], bool], *, skip: int = 0) -> Iterator[Finding]:
        """Send calls while ``may_go_on(their number)``; yield findings. skip: calls that are drawn, not
        sent.
        """
        while may_go_on(self.count):
            method = self._rng.choice(_SERVICE.methods)
            raw = random_bytes(random_message(method.input_type, self._rng), self._rng)
            leaves = self._rng.random() < 0.1
            number, self.count = self.count, self.count + 1
            if number < skip:
                continue
            found = self._send(method.name, raw, leaves=leaves)
            self.statuses[f"{method.name} {found}"] += 1
            if found in {code.name for code in FINDINGS} or found == "hangs":
                yield Finding(number, method.name, raw, found)

    def plain_call_works(self) -> bool:
        """Tell whether the worker still answers what makes sense."""
        request = pb.GenerateRequest(input=pb.Input(text="Hello"))
        request.sampling.max_tokens = 2
        return self._send("Generate", request.SerializeToString(), leaves=False) == "OK"

    def _send(self, name: str, raw: bytes, *, leaves: bool) -> str:
        path = f"/{_SERVICE.full_name}/{name}"
        limit = STREAM_S if name in _MAKE_TOKENS else CALL_S
        try:
            if name == "GenerateStream":
                stream: Any = self._channel.unary_stream(path)(raw, timeout=limit)
                for _ in stream:
                    if leaves:
                        stream.cancel()
                        return "left"
                return "OK"
            self._channel.unary_unary(path)(raw, timeout=limit)
        except grpc.RpcError as error:
            code = error.code()
            late = code is grpc.StatusCode.DEADLINE_EXCEEDED and name not in _MAKE_TOKENS
            return "hangs" if late else str(code.name)
        return "OK"


def main() -> int:
    """Parse the arguments, call, and say what came of it."""
    parser = argparse.ArgumentParser(prog="fuzz.calls")
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0)
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    with grpc.insecure_channel(asked.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        calls = RandomCalls(channel, asked.seed)
        for finding in calls.run(lambda _: time.monotonic() < end, skip=asked.skip):
            sys.stdout.write(
                f"{finding.found}: {finding.method}, call {finding.number}: {finding.raw.hex()}\n"
            )
            return 1
        sys.stdout.write(f"{calls.count} calls: {dict(calls.statuses.most_common())}\n")
        if not calls.plain_call_works():
            sys.stdout.write("a plain call is not answered any more\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
