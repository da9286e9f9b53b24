"""Which functions of llorch_serve one decoded token passes to be made and to be sent, as two lists.

    ci/measurement token_path

A worker on the fake session answers one stream with default sampling, over a gRPC server in this process. One
decode step in the middle of the answer is watched: from the look for commands to the step's events, and from
there, on the engine's thread and on the server's, to the message. The engine waits before the next step until
the client has the message. Comprehensions, lambdas and generated code are not counted.
"""

from __future__ import annotations

import enum
import tempfile
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

import llorch_serve
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.engine.engine import Engine
from llorch_serve.engine.loop import EngineLoop
from llorch_serve.requests import GenerationRequest, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from support.fakes.session import Call
from support.harness.rpc import running_server
from support.harness.worker import make_session, make_worker

WATCHED: int = 8
"""The decode call whose step is watched: the ones before it make buffers and wake threads."""

PAUSE_S = 0.2
"""Beyond the time that updates are spaced by, so that the watched one is sent at once."""

_ROOT = Path(llorch_serve.__file__).parent
_LOOK = EngineLoop._take_commands.__code__
_STEP = Engine.step.__code__


class Phase(enum.Enum):
    """What is watched at the moment."""

    BEFORE = "before"
    MADE = "made"
    SENT = "sent"
    AFTER = "after"


class Watch:
    """Notes the functions that are called in each phase, in the order of their first call."""

    def __init__(self) -> None:
        self.phase = Phase.BEFORE
        self.found: dict[Phase, dict[CodeType, None]] = {phase: {} for phase in Phase}
        self.next_is_watched = False
        self._engine_is_done = False

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Note a call. Called by the interpreter, on every thread."""
        code, on_engine = frame.f_code, threading.current_thread().name == "llorch-engine"
        if event == "return" and code is _STEP and self.phase is Phase.MADE:
            self.phase = Phase.SENT
        if event != "call":
            return
        if code is _LOOK:
            self._engine_is_done = self.phase is Phase.SENT
            if self.next_is_watched:
                self.next_is_watched, self.phase = False, Phase.MADE
                assert frame.f_back is not None
                self._note(frame.f_back.f_code)
        if self.phase is Phase.SENT if not on_engine else not self._engine_is_done:
            self._note(code)

    def _note(self, code: CodeType) -> None:
        if code.co_filename.startswith(str(_ROOT)) and not code.co_name.startswith("<"):
            self.found[self.phase][code] = None


class Gate:
    """Stops the engine before each decode call until the last step's token has come."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.decoded = 0
        self.arrived = threading.Semaphore(0)

    def __call__(self, call: Call) -> None:
        """Wait. The engine's thread."""
        if call.kind != "decode":
            return
        assert self.arrived.acquire(timeout=10)
        self.decoded += 1
        self.watch.next_is_watched = self.decoded == WATCHED - 1
        if self.decoded == WATCHED:
            time.sleep(PAUSE_S)


def watched() -> Watch:
    """Return what was seen of one token."""
    watch = Watch()
    gate = Gate(watch)
    threading.setprofile(watch)
    with tempfile.TemporaryDirectory() as folder:
        worker = make_worker(Path(folder), make_session(before_call=gate))
        with running_server(worker, stream_interval=None) as running, WorkerClient(running.address) as client:
            sampling = SamplingParams(max_tokens=2 * WATCHED, ignore_eos=True)
            for _ in client.generate(GenerationRequest("r", TokenPrompt((1, 2, 3)), sampling)):
                if watch.phase is Phase.SENT:
                    watch.phase = Phase.AFTER
                gate.arrived.release()
        worker.close()
    threading.setprofile(None)
    return watch


def main() -> None:
    """Print both lists."""
    watch = watched()
    for phase in (Phase.MADE, Phase.SENT):
        found = watch.found[phase]
        files = {code.co_filename for code in found}
        print(f"{phase.value}: {len(found)} functions in {len(files)} files")  # noqa: T201 - a script's output
        for code in found:
            print(f"    {Path(code.co_filename).relative_to(_ROOT)}: {code.co_qualname}")  # noqa: T201 - as above


if __name__ == "__main__":
    main()
