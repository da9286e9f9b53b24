"""The process of one stage. ``PYTHON -m llorch_serve.stages.child CONTROL LANE...``, the numbers of sockets.

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
from typing import Final

from llorch_serve.runtime.bound_graph import Logits
from llorch_serve.stages import control
from llorch_serve.stages.framing import Messages
from llorch_serve.stages.loading import StageLoader
from llorch_serve.stages.remote import answered
from llorch_serve.stages.shared_logits import map_logits
from llorch_serve.stages.stage import Stage

_BROKEN: Final = 70  # an exit code: EX_SOFTWARE of sysexits.h
_END_SIGNALS: Final = ("SIGINT", "SIGTERM")


class Child:
    """Loads a stage as it is told, then answers the lanes. ends: of the lanes' sockets."""

    def __init__(self, ends: Sequence[Messages]) -> None:
        self._ends = ends
        self._loader: StageLoader | None = None
        self._memories: list[Logits] = []

    def answer(self, question: control.Question) -> control.Answer:
        """Do what is asked. Failures are answers too."""
        try:
            if isinstance(question, control.Open):
                if question.cores and hasattr(os, "sched_setaffinity"):
                    os.sched_setaffinity(0, question.cores)
                self._memories = [map_logits(descriptor) for descriptor in question.memories]
                self._loader = StageLoader(control.asked_settings(question))
                return control.Room(room=self._loader.room())
            assert self._loader is not None, "room is asked for before loading"
            stage = self._loader.load(question.lanes, self._memories)
        except Exception as error:  # noqa: BLE001 - told to the process that asks
            return control.refused(error)
        for lane, end in enumerate(self._ends[: len(question.lanes)]):
            memory = self._memories[lane] if self._memories else None
            _on_thread(partial(serve, stage, lane, end, memory))
        return control.loaded(stage.facts)


def serve(stage: Stage, lane: int, end: Messages, memory: Logits | None) -> None:
    """Answer a lane's questions until they end. memory: that its logits are written to."""
    while (message := end.receive()) is not None:
        try:
            end.send(answered(stage, lane, message, memory))
        except OSError:  # the worker is gone; so is this process in a moment
            return


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


def main() -> None:
    """Answer until the worker has ended."""
    # Ctrl-C and a service manager's SIGTERM reach the whole group; the worker decides when this ends.
    for name in _END_SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    if sys.platform == "linux":
        # On a core of a stage's, the worker runs as soon as it has something to do: all stages wait for it.
        # It takes a fraction of a millisecond, and this process gets no less time than any other.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    ends = [Messages(socket.socket(fileno=int(number))) for number in sys.argv[1:]]
    messages, child = ends[0], Child(ends[1:])
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
