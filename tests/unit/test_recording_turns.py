"""Calls of a device wait for a recording, and it for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from llorch_serve.providers.recording_turns import RecordingTurns

_LIMIT_S = 20


class Other:
    """A thread that enters, says so, and leaves when it is told to."""

    def __init__(self, turn: Callable[[], AbstractContextManager[None]]) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._main, args=(turn,))
        self.thread.start()

    def _main(self, turn: Callable[[], AbstractContextManager[None]]) -> None:
        with turn():
            self.inside.set()
            self.leave.wait(_LIMIT_S)

    def end(self) -> None:
        self.leave.set()
        self.thread.join(_LIMIT_S)
        assert not self.thread.is_alive()


def waiting(turns: RecordingTurns, recordings: int) -> None:
    """Return when so many recordings are made or wait."""
    deadline = time.monotonic() + _LIMIT_S
    while turns._recordings != recordings:
        assert time.monotonic() < deadline


def test_calls_are_made_together() -> None:
    turns = RecordingTurns()
    with turns.call():
        other = Other(turns.call)
        assert other.inside.wait(_LIMIT_S)
        other.end()


def test_a_recording_is_alone() -> None:
    turns = RecordingTurns()
    for turn in (turns.call, turns.recording):
        with turns.recording():
            other = Other(turn)
            assert not other.inside.wait(0.05)
        assert other.inside.wait(_LIMIT_S)
        other.end()


def test_a_recording_waits_for_calls_and_goes_before_later_ones() -> None:
    turns = RecordingTurns()
    with turns.call():
        recording = Other(turns.recording)
        waiting(turns, 1)
        later = Other(turns.call)
        assert not recording.inside.wait(0.05)
    assert recording.inside.wait(_LIMIT_S)
    assert not later.inside.is_set()
    recording.end()
    assert later.inside.wait(_LIMIT_S)
    later.end()


def test_who_gives_up_waiting_to_record_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = RecordingTurns()

    def interrupted(_ready: Callable[[], bool]) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(turns._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), turns.recording():
            pytest.fail("it never began")
    other = Other(turns.call)
    assert other.inside.wait(_LIMIT_S)
    other.end()


def test_a_turn_that_fails_is_over() -> None:
    turns = RecordingTurns()
    for turn in (turns.call, turns.recording):
        with pytest.raises(ValueError, match="broken"), turn():
            raise ValueError("broken")
    with turns.recording():
        pass
    with turns.call():
        pass
