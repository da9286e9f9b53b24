"""Turns of a process's threads on a device that records kernels.

While onnxruntime records on CUDA, most calls of CUDA by any other thread of the process fail, and the
recording with them (cudaStreamCaptureModeGlobal). So whoever records waits for the others' calls, and they
for it: a process may hold several models, each with a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final


class RecordingTurns:
    """Any number of calls at once, or one recording. A recording that waits goes before calls that come
    later. Neither may be begun inside the other, nor a call in a call.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls = 0
        self._recordings = 0  # one is made, or some wait
        self._recording = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Wait for recordings; none begins inside."""
        with self._changed:
            self._changed.wait_for(lambda: not self._recordings)
            self._calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Wait for calls and for another recording; no call begins inside."""
        with self._changed:
            self._recordings += 1
            try:
                self._changed.wait_for(lambda: not self._calls and not self._recording)
            except BaseException:  # Ctrl-C: calls wait for nobody
                self._recordings -= 1
                self._changed.notify_all()
                raise
            self._recording = True
        try:
            yield
        finally:
            with self._changed:
                self._recordings -= 1
                self._recording = False
                self._changed.notify_all()


TURNS: Final = RecordingTurns()
"""This process's, as CUDA's rule is about the process."""
