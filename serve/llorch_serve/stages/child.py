"""The process of one stage: ``PYTHON -m llorch_serve.stages.child CONTROL [EDITS TAKEN GIVEN]...``.

These are numbers of sockets: one for loading, and for each lane one for its edits and two for calls, by which
they come and go on.

What it loads and computes is asked for over them, see ``control.py`` and ``wire.py``. It ends when the other
end of the first one is gone, so it never outlives the worker.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from llorch_serve.errors import ResourceError
from llorch_serve.runtime.bound_graph import Logits
from llorch_serve.stages import control
from llorch_serve.stages.framing import Messages
from llorch_serve.stages.loading import StageLoader
from llorch_serve.stages.remote import answered, handed_on
from llorch_serve.stages.shared_logits import map_logits
from llorch_serve.stages.wire import Buffers

_BROKEN: Final = 70  # an exit code: EX_SOFTWARE of sysexits.h
_END_SIGNALS: Final = ("SIGINT", "SIGTERM")


class LaneSockets(NamedTuple):
    """One lane's sockets at this end."""

    edits: Messages
    taken: Messages
    given: Messages


class Child:
    """Loads a stage as it is told, then answers the lanes. ends: of each lane."""

    def __init__(self, ends: Sequence[LaneSockets]) -> None:
        self._ends = ends
        self._loader: StageLoader | None = None
        self._memories: list[Logits] = []

    def answer(self, question: control.Question) -> control.Answer:
        """Do what is asked. Failures are answers too."""
        try:
            if isinstance(question, control.Open):
                _keep_to(question.cores)
                self._memories = [map_logits(descriptor) for descriptor in question.memories]
                self._loader = StageLoader(control.asked_settings(question))
                return control.Room(room=self._loader.room())
            assert self._loader is not None, "room is asked for before loading"
            stage = self._loader.load(question.lanes, self._memories)
        except Exception as error:  # noqa: BLE001 - told to the process that asks
            return control.refused(error)
        for lane, end in enumerate(self._ends[: len(question.lanes)]):
            _on_thread(partial(serve, partial(answered, stage, lane), end.edits, end.edits))
            memory = self._memories[lane] if self._memories else None
            call = (
                partial(answered, stage, lane, memory=memory)
                if stage.is_last
                else partial(handed_on, stage, lane)
            )
            _on_thread(partial(serve, call, end.taken, end.given))
        return control.loaded(stage.facts)


def serve(answer: Callable[[memoryview], Buffers], asked: Messages, told: Messages) -> None:
    """Answer the questions that come by one socket into another, or the same, until they end."""
    while (message := asked.receive()) is not None:
        found = answer(message)  # an OSError of the stage's own is no broken connection
        try:
            told.send(found)
        except OSError:  # the worker is gone, or the next stage; so is this process in a moment
            break
    told.close()  # whoever waits there waits for nothing


def _on_thread(work: Callable[[], None]) -> None:
    """Run work on a thread. An error that it does not answer with ends the process, and so the worker, which
    reports it: nothing that this stage holds can be trusted after it.
    """

    def run() -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001 - whatever it is, nobody else would learn of it
            traceback.print_exc()
            os._exit(_BROKEN)

    threading.Thread(target=run, daemon=True).start()


def _keep_to(cores: Sequence[int]) -> None:
    """Run on these cores alone; none: on any. Raises ResourceError where the system refuses it."""
    if cores and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            raise ResourceError(
                f"the system refuses a stage's process the cores {', '.join(map(str, cores))} "
                f"({error.strerror}); with --threads it chooses the cores itself"
            ) from error


def let_worker_in() -> None:
    """Have the worker run on a core of this process's as soon as it has something to do: all stages wait for
    it.

    It takes a fraction of a millisecond, and this process gets no less time than any other. A policy that
    somebody chose for the worker stays. Where the system has no such policy or forbids to choose one, as
    sandboxes do, that is said, and answers only come later.
    """
    if sys.platform == "linux":
        try:
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError as error:
            sys.stderr.write(f"note: a stage cannot let the worker in at once: {error.strerror}\n")


def main() -> None:
    """Answer until the worker has ended."""
    # Ctrl-C and a service manager's SIGTERM reach the whole group; the worker decides when this ends.
    for name in _END_SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    let_worker_in()
    messages, *ends = [Messages(socket.socket(fileno=int(number))) for number in sys.argv[1:]]
    child = Child([LaneSockets(*ends[place : place + 3]) for place in range(0, len(ends), 3)])
    asked: queue.SimpleQueue[control.Question] = queue.SimpleQueue()

    def work() -> None:
        while True:
            messages.send([control.write(child.answer(asked.get()))])

    _on_thread(work)
    # This thread sees at once that the worker is gone, also while a stage is loaded or run on another.
    while (message := messages.receive()) is not None:
        asked.put(control.read_question(message))
    os._exit(0)


if __name__ == "__main__":
    main()
