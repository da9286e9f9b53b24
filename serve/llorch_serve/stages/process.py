"""A stage in a process of its own, seen from the worker: started, loaded, called, and ended whatever happens.

There is one connected pair of sockets for loading, which is closed when either process ends, and one for the
edits of each lane. Calls come by those of ``relay.py``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.errors import StageEndedError
from llorch_serve.python_child import child_environment, module_command
from llorch_serve.runtime.bound_graph import Logits
from llorch_serve.runtime.row_pairs import even
from llorch_serve.stages import control, wire
from llorch_serve.stages.calls import StagePort
from llorch_serve.stages.ending import Ending
from llorch_serve.stages.framing import Messages
from llorch_serve.stages.loading import StageRoom, StageSettings
from llorch_serve.stages.relay import Links, Relay, connect
from llorch_serve.stages.remote import RemotePort
from llorch_serve.stages.shared_logits import make_memory, map_logits
from llorch_serve.stages.stage import StageFacts

_END_S: Final = 10.0  # for a process whose socket is closed to end by itself


class ProcessHost:
    """A stage in a process of its own. Implements :class:`llorch_serve.stages.hosts.StageHost`.

    ports: one for each lane. memories: that the stage writes each lane's logits to; None: it has no such
    memory. ending: tells when its process has ended.

    links: by which calls reach it and go on, one for each lane that there can be. cores: that it may run on;
    empty: any.
    """

    def __init__(self, settings: StageSettings, links: Links, *, cores: tuple[int, ...]) -> None:
        lanes = len(links.taken)
        self._name = f"stage {settings.number} of {settings.artifact.folder.name}"
        ours, theirs = zip(*(socket.socketpair() for _ in range(1 + lanes)), strict=True)
        memories = _shared_memories(settings, lanes)
        lane_ends = zip(theirs[1:], links.taken, links.given, strict=True)
        fds = [end.fileno() for ends in (theirs[:1], *lane_ends) for end in ends]
        try:
            self._process = subprocess.Popen(
                module_command(sys.executable, "llorch_serve.stages.child", *map(str, fds)),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_stderr() else subprocess.DEVNULL,
                env=child_environment(),
                pass_fds=(*fds, *memories),
            )
        except BaseException:
            for end in ours:
                end.close()
            for memory in memories:
                os.close(memory)
            raise
        finally:
            links.close()
            for end in theirs:
                end.close()
        self._control, *self._lanes = (Messages(end) for end in ours)
        self.memories: tuple[Logits | None, ...] = tuple(map(map_logits, memories)) or (None,) * lanes
        self.ports = tuple(RemotePort(partial(self._exchange, end)) for end in self._lanes)
        self.ending = Ending()
        threading.Thread(target=self._watch, name="llorch-stage-watch", daemon=True).start()
        try:
            self._ask(control.ask_room(settings, cores, tuple(memories)))
        except BaseException:
            self.close()
            raise

    def room(self) -> StageRoom:
        """See the protocol."""
        return self._take(control.Room).room

    def begin(self, lanes: Sequence[KvCapacity]) -> None:
        """See the protocol."""
        self._ask(control.Load(lanes=tuple(lanes)))

    def facts(self) -> StageFacts:
        """See the protocol."""
        return self._take(control.Loaded).facts

    def port(self, lane: int) -> StagePort:
        """See the protocol."""
        return self.ports[lane]

    @property
    def process_id(self) -> int:
        """Of the stage's process."""
        return self._process.pid

    def when_ended(self, tell: Callable[[StageEndedError], None]) -> None:
        """See the protocol."""
        self.ending.when_ended(tell)

    def close(self) -> None:
        """See the protocol: the process ends with its sockets, and is killed if it does not."""
        self.ending.close()
        for end in (self._control, *self._lanes):
            end.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
            return
        self._process.kill()
        self._process.wait()

    def _exchange(self, end: Messages, question: wire.Buffers) -> memoryview:
        """Return a lane's answer. Raises StageEndedError if there is none."""
        try:
            end.send(question)
            answer = end.receive()
        except OSError:
            answer = None
        if answer is None:
            raise self._ended()
        return answer

    def _ask(self, question: control.Question) -> None:
        try:
            self._control.send([control.write(question)])
        except OSError:
            raise self._ended() from None

    def _take(self, kind: type[control.A]) -> control.A:
        """Return the next answer. Raises what it tells of, and StageEndedError if there is none."""
        message = self._control.receive()
        if message is None:
            raise self._ended()
        return control.read_answer(message, kind)

    def _ended(self) -> StageEndedError:
        """Return how the process has ended, which it has or is about to."""
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return StageEndedError(f"{self._name} has closed its connection; start the worker again")
        how = f"exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):  # a signal without a name
                how = f"signal {signal.Signals(-code).name}"
        if how == "signal SIGKILL":
            how += " (as the system ends one where memory is short)"
        return StageEndedError(
            f"the process of {self._name} ended with {how}, and the keys and values of all sequences with "
            f"it; start the worker again"
        )

    def _watch(self) -> None:
        self._process.wait()
        self.ending.tell(self._ended())


def start_processes(
    settings: Sequence[StageSettings], cores: Sequence[tuple[int, ...]], lanes: int
) -> tuple[list[ProcessHost], list[Relay]]:
    """Start a process for each stage; return them, and the way of each lane's calls through all of them.

    cores: that each may run on; empty: any. lanes: most that there will be.
    """
    links, ends = connect(len(settings), lanes)
    hosts: list[ProcessHost] = []
    try:
        for each, own_links, own_cores in zip(settings, links, cores, strict=True):
            hosts.append(ProcessHost(each, own_links, cores=own_cores))
    except BaseException:
        for host in hosts:
            host.close()
        for each_links in links:
            each_links.close()
        for lane_ends in ends:
            lane_ends.close()
        raise
    endings = [host.ending for host in hosts]
    memories = hosts[-1].memories
    relays = [
        Relay(own, [host.ports[lane] for host in hosts], memories[lane], endings)
        for lane, own in enumerate(ends)
    ]
    return hosts, relays


def _shared_memories(settings: StageSettings, lanes: int) -> list[int]:
    """Return a descriptor for the logits of each lane of the last stage; none for others, or where the system
    has no such memory.
    """
    manifest = settings.artifact.manifest
    if settings.number + 1 < len(manifest.stages or ()):
        return []
    size = 4 * even(settings.config.slots) * manifest.model.vocab_size
    found = [make_memory(size) for _ in range(lanes)]
    return [each for each in found if each is not None]


def _has_stderr() -> bool:
    """Tell whether this process has an error stream that a child can write to, as under tests it may not."""
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
