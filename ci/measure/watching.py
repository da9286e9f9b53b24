"""A worker process watched from outside while something is done to it: health, memory, threads and
descriptors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from llorch_serve.rpc import SERVICE_NAME
from support.harness.processes import PATIENCE_S

PAUSE_S = 0.1  # between two health checks, of which every second one opens a connection as a probe does
SPARE = 4  # descriptors and threads beyond those at first: gRPC keeps a few until it needs them
SETTLING_S = 30.0  # for what clients left behind to be closed


@dataclass(slots=True)
class Watched:
    """What was seen of the worker beside the load, each with its moment on the monotonic clock.

    memory: resident bytes that are the process's own; pages of the weights' file come and go as the system
        likes. kept_ms, new_ms: how long health took on a connection that stays, and on one of its own.
    control_ms: the same, by turns, of a server beside it, if there is one. unwell: checks that did not say
        SERVING.
    """

    memory: list[tuple[float, int]] = field(default_factory=list)
    kept_ms: list[float] = field(default_factory=list)
    new_ms: list[float] = field(default_factory=list)
    control_ms: list[float] = field(default_factory=list)
    unwell: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Threads and open descriptors of a process."""

    threads: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Return those of a process now."""
        process = psutil.Process(pid)
        return cls(process.num_threads(), process.num_fds())

    def within(self, other: Footprint, spare: int = SPARE) -> bool:
        """Whether there are at most so many more than in ``other``."""
        return self.threads <= other.threads + spare and self.descriptors <= other.descriptors + spare


@contextmanager
def watching(address: str, pid: int, control: str | None = None) -> Iterator[Watched]:
    """Check health and read memory every :data:`PAUSE_S` until the block ends. control: address of another
    server, to be checked beside.
    """
    watched, ended, process = Watched(), threading.Event(), psutil.Process(pid)

    def check(channel: grpc.Channel, times: list[float]) -> None:
        begun = time.perf_counter()
        try:
            request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_S).status
            if status != health_pb2.HealthCheckResponse.SERVING:
                watched.unwell.append(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
        except grpc.RpcError as error:
            watched.unwell.append(f"{error.code().name}: {error.details()}")
        times.append(1000 * (time.perf_counter() - begun))

    servers = [(address, watched.kept_ms, watched.new_ms)]
    if control is not None:
        servers.append((control, watched.control_ms, watched.control_ms))
    own = (("grpc.use_local_subchannel_pool", 1),)

    def run() -> None:
        with ExitStack() as stack:
            kept = [stack.enter_context(grpc.insecure_channel(at, options=own)) for at, *_ in servers]
            while not ended.is_set():
                memory = process.memory_info()
                watched.memory.append((time.monotonic(), memory.rss - memory.shared))
                for channel, (_, kept_ms, _) in zip(kept, servers, strict=True):
                    check(channel, kept_ms)
                ended.wait(PAUSE_S)
                for at, _, new_ms in servers:
                    with grpc.insecure_channel(at, options=own) as new:
                        check(new, new_ms)
                ended.wait(PAUSE_S)

    thread = threading.Thread(target=run, name="watching")
    thread.start()
    try:
        yield watched
    finally:
        ended.set()
        thread.join()


def settled(pid: int, wanted: Footprint) -> Footprint:
    """Return the footprint once it is within ``wanted``, or has not come there in :data:`SETTLING_S`."""
    deadline = time.monotonic() + SETTLING_S
    while True:
        found = Footprint.of(pid)
        if found.within(wanted) or time.monotonic() > deadline:
            return found
