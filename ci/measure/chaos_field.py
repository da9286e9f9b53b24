"""The ground of ``chaos.py``: a worker, neighbours whose answers are known, and what every row of the table
says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc import worker_pb2_grpc
from measure.chaos_client import request
from measure.watching import SETTLING_S, Footprint, settled
from support.harness.processes import PATIENCE_S, WorkerProcess, serving

SLOTS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """What requests look like, so that a test's tiny model and a real one are busy for about as long.

    long_prompt: tokens that take long enough to prefill for a client to be killed meanwhile. answer: tokens
        that take a second
    or two. endless: more than are generated during the run. health_ms: that 99 of 100 health checks may take.
    attack_s: for how long strangers attack.
    """

    long_prompt: int
    answer: int
    endless: int
    health_ms: float
    attack_s: float


@dataclass(slots=True)
class Row:
    """One attack. times: how often. saw: what came of it. freed_ms: until nothing of it was left. lost: what
    must not be.
    """

    attack: str
    times: int = 0
    saw: str = ""
    freed_ms: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Field:
    """A worker under attack. alone: what :func:`request` with ``answer`` tokens gives while nothing else is
    going on.
    """

    worker: WorkerProcess
    stub: worker_pb2_grpc.GenerationServiceStub
    sizes: Sizes
    alone: list[int]
    footprint: Footprint
    answers: int = 0

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self.worker.address

    @property
    def pid(self) -> int:
        """The worker's."""
        return self.worker.command.process.pid

    def load(self) -> pb.GetLoadResponse:
        """Ask how busy the worker is."""
        return self.stub.GetLoad(pb.GetLoadRequest(), timeout=PATIENCE_S)

    def ask(self) -> list[int]:
        """Return the tokens of the answer that every neighbour expects."""
        return ask(self.stub, self.sizes)

    def wait_for(self, happened: Callable[[pb.GetLoadResponse], bool]) -> float:
        """Ask for the load until ``happened``; return for how many milliseconds."""
        begun = time.perf_counter()
        while not happened(found := self.load()):
            if time.perf_counter() - begun > SETTLING_S:
                raise AssertionError(f"it never happened; the load is {found}")
        return 1000 * (time.perf_counter() - begun)

    @contextmanager
    def attack(self, row: Row, *, neighbours: int = SLOTS - 1, endless: bool = False) -> Iterator[Row]:
        """Run neighbours while the block attacks; afterwards see whether all is as it was.

        They ask for the known answer again and again, or, ``endless``, each for one that does not end, so
        that as many requests run at any moment.
        """
        with Neighbours(self, row, neighbours, endless=endless) as others:
            self.wait_for(lambda load: load.running == neighbours)
            yield row
        heard = others.heard
        self.answers += len(heard)
        longest = max([self.alone, *heard], key=len)
        if any(tokens != longest[: len(tokens)] for tokens in (*heard, self.alone)):
            row.lost.append("a neighbour's answer was another one")
        self.wait_for(lambda load: (load.running, load.waiting, load.kv_tokens_running) == (0, 0, 0))
        if self.ask() != self.alone:
            row.lost.append("the answer afterwards was another one")
        after = settled(self.pid, self.footprint)
        if not after.within(self.footprint):
            row.lost.append(f"from {self.footprint} to {after}")


class Neighbours:
    """Clients that want answers while a worker is attacked, until the block ends. heard: the tokens of each
    answer.
    """

    def __init__(self, ground: Field, row: Row, count: int, *, endless: bool) -> None:
        self._ground = ground
        self._row = row
        self._over = threading.Event()
        self.heard: list[list[int]] = []
        self._streams: list[Any] = []
        if endless:
            ask_endless = ground.stub.GenerateStream
            self._streams = [ask_endless(request(16, ground.sizes.endless)) for _ in range(count)]
        self._threads = [threading.Thread(target=self._endlessly, args=(stream,)) for stream in self._streams]
        if not endless:
            self._threads = [threading.Thread(target=self._again_and_again) for _ in range(count)]

    def __enter__(self) -> Neighbours:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        for stream in self._streams:
            stream.cancel()
        for thread in self._threads:
            thread.join()

    def _again_and_again(self) -> None:
        while not self._over.is_set():
            try:
                self.heard.append(self._ground.ask())
            except grpc.RpcError as error:
                self._lose(error)

    def _endlessly(self, stream: Any) -> None:
        self.heard.append(tokens := [])
        try:
            for response in stream:
                tokens += response.token_ids
            self._row.lost.append("a neighbour's answer ended")
        except grpc.RpcError as error:
            if not self._over.is_set():
                self._lose(error)

    def _lose(self, error: Any) -> None:
        self._row.lost.append(f"a neighbour's call ended with {error.code().name}: {error.details()}")


def ask(stub: worker_pb2_grpc.GenerationServiceStub, sizes: Sizes) -> list[int]:
    """Return the tokens of the answer that every neighbour expects."""
    return list(stub.Generate(request(16, sizes.answer).request, timeout=PATIENCE_S).choices[0].token_ids)


@contextmanager
def field_of(artifact: Path, sizes: Sizes) -> Iterator[Field]:
    """Start a worker, have all its slots and threads used once, and take its footprint."""
    # Rows alone decide what is computed: an answer with neighbours must be the one without, and cached
    # prefixes are rounded.
    flags = ("--slots", SLOTS, "--no-prefix-cache", "--max-context", sizes.endless + sizes.long_prompt)
    with serving(artifact, *flags) as worker, grpc.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.GenerationServiceStub(channel)
        alone = ask(stub, sizes)
        futures = [stub.Generate.future(request(16, sizes.answer).request) for _ in range(2 * SLOTS)]
        for future in futures:
            future.result(PATIENCE_S)
        yield Field(worker, stub, sizes, alone, Footprint.of(worker.command.process.pid))
