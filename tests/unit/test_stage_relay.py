"""A lane's calls go from stage to stage; the last one's answer comes back, and what one fails with."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import cast

import numpy as np
import pytest

from llorch_serve.engine.load import StageTimes
from llorch_serve.errors import ProviderError, StageEndedError
from llorch_serve.runtime.stage_graph import Rows
from llorch_serve.stages import relay, wire
from llorch_serve.stages.calls import StageCall
from llorch_serve.stages.child import serve
from llorch_serve.stages.ending import Ending
from llorch_serve.stages.framing import Messages
from llorch_serve.stages.relay import Links, Relay, connect
from llorch_serve.stages.remote import RemotePort, answered, handed_on
from llorch_serve.stages.stage import Stage

CALL = StageCall(True, 3, (7,), (10, 11, 12), (0, 2))
PATIENCE_S = 20


class FakeStage:
    """Adds its number to what it is given; fails as it is told."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[StageCall] = []
        self.failure: Exception | None = None

    @property
    def times(self) -> StageTimes:
        return StageTimes(len(self.calls), self.number + 0.5, 0.25)

    def run(self, lane: int, call: StageCall) -> Rows:
        assert lane == 0
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure
        before = np.array([call.token_ids], np.float32)[..., None] if call.rows is None else call.rows
        return before + self.number


class Stages:
    """Three fake stages on threads of this process, and the relay through them."""

    def __init__(self) -> None:
        links, (ends,) = connect(3, 1)
        self.fakes = [FakeStage(10 * number) for number in (1, 2, 3)]
        self.endings = [Ending() for _ in links]
        self.ports = [RemotePort(lambda _: memoryview(b"")) for _ in links]
        self.relay = Relay(ends, self.ports, None, self.endings)
        self.sockets = [(Messages(own.taken[0]), Messages(own.given[0])) for own in links]
        self.threads = [
            threading.Thread(target=serve, args=(self._work(fake, fake is self.fakes[-1]), taken, given))
            for fake, (taken, given) in zip(self.fakes, self.sockets, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def _work(self, fake: FakeStage, is_last: bool) -> partial[wire.Buffers]:
        return partial(answered if is_last else handed_on, cast("Stage", fake), 0)

    def close(self) -> None:
        self.relay.close()
        for thread in self.threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self.threads)
        for taken, given in self.sockets:
            taken.close()
            given.close()


@pytest.fixture
def stages() -> Iterator[Stages]:
    found = Stages()
    yield found
    found.close()


def test_a_call_goes_through_all_stages_and_the_last_ones_answer_comes_back(stages: Stages) -> None:
    np.testing.assert_array_equal(stages.relay.run(CALL), np.array([[[70], [71], [72]]], np.float32))
    for fake in stages.fakes:
        (call,) = fake.calls
        assert (call.prompt, call.first, tuple(call.lengths)) == (True, 3, (7,))
        assert (tuple(call.token_ids), tuple(call.wanted)) == ((10, 11, 12), (0, 2))
    assert [port.times() for port in stages.ports] == [fake.times for fake in stages.fakes]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_a_stage_fails_with_is_raised_and_the_next_call_is_answered(
    stages: Stages, failing: int
) -> None:
    stages.fakes[failing].failure = ProviderError("no room on the device")
    with pytest.raises(ProviderError, match=r"^no room on the device$"):
        stages.relay.run(CALL)
    assert [len(fake.calls) for fake in stages.fakes] == [1] * (failing + 1) + [0] * (2 - failing)
    stages.fakes[failing].failure = None
    assert stages.relay.run(CALL).shape == (1, 3, 1)


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_a_stage_that_is_gone_is_named(stages: Stages, ended: int) -> None:
    for end in stages.sockets[ended]:
        end.close()
    stages.endings[ended].tell(StageEndedError(f"stage {ended} is gone"))
    with pytest.raises(StageEndedError, match=f"^stage {ended} is gone$"):
        stages.relay.run(CALL)


def test_who_waits_for_an_answer_learns_that_the_stages_are_closed(stages: Stages) -> None:
    began, go_on = threading.Event(), threading.Event()
    found: list[BaseException] = []

    def hang(lane: int, call: StageCall) -> Rows:
        began.set()
        assert go_on.wait(PATIENCE_S)
        return np.zeros((1, 3, 1), np.float32)

    stages.fakes[1].run = hang  # type: ignore[method-assign]

    def ask() -> None:
        try:
            stages.relay.run(CALL)
        except StageEndedError as error:
            found.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    assert began.wait(PATIENCE_S)
    stages.relay.close()
    waiting.join(PATIENCE_S)
    go_on.set()
    assert [str(error) for error in found] == ["the stages have been closed"]


def test_every_call_after_a_stage_has_ended_tells_of_it_at_once(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_END_S", 0)
    stages.endings[1].tell(StageEndedError("stage 1 is gone"))
    for end in stages.sockets[1]:
        end.close()
    for _ in range(2):
        with pytest.raises(StageEndedError, match=r"^stage 1 is gone$"):
            stages.relay.run(CALL)


def test_an_error_of_the_systems_in_a_stage_is_no_broken_connection() -> None:
    ours, theirs = map(Messages, socket.socketpair())
    ours.send([b"a question"])

    def refuse(_question: memoryview) -> wire.Buffers:
        raise OSError(errno.EINVAL, "pages are locked")

    with pytest.raises(OSError, match="pages are locked"):
        serve(refuse, theirs, theirs)
    ours.close()
    theirs.close()


def test_an_edit_is_no_call() -> None:
    question = memoryview(b"".join(wire.pack(wire.Release(slot=1, keep=2))))
    with pytest.raises(ValueError, match=r"^Release is no call$"):
        handed_on(cast("Stage", FakeStage(1)), 0, question)


def test_what_one_process_is_given_can_be_closed_there() -> None:
    links, ends = connect(2, 2)
    assert [len(own.taken) for own in links] == [len(own.given) for own in links] == [2, 2]
    for own in links:
        assert isinstance(own, Links)
        own.close()
    for lane in ends:
        assert lane.last.receive() is None
        lane.first.close()
        lane.last.close()
