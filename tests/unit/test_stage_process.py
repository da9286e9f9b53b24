"""A stage's process that cannot be started leaves nothing open; a strict sandbox does not keep one from
starting.
"""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from llorch_serve.stages import control
from llorch_serve.stages.child import Child, let_worker_in
from llorch_serve.stages.process import start_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors and policies are Linux's here")


def settings(number: int, stages: int) -> Any:
    found = mock.Mock(number=number)
    found.config.slots = 2
    found.artifact.folder = Path("model")
    found.artifact.manifest.stages = (None,) * stages
    found.artifact.manifest.model.vocab_size = 64
    return found


def open_descriptors() -> set[str]:
    return {each.name for each in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("stages", [1, 2])
def test_a_process_that_cannot_be_started_leaves_no_descriptor_open(
    monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "too many processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    gc.disable()
    try:
        before = open_descriptors()
        with pytest.raises(OSError, match="too many processes"):
            start_processes([settings(number, stages) for number in range(stages)], [()] * stages, 3)
        assert open_descriptors() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL])
def test_a_stage_goes_on_where_a_sandbox_refuses_its_policy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    let_worker_in()
    assert capsys.readouterr().err == (
        f"note: a stage cannot let the worker in at once: {os.strerror(number)}\n"
    )


def test_a_policy_that_somebody_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", lambda _process: os.SCHED_IDLE)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: pytest.fail("changed"))
    let_worker_in()


def test_cores_that_a_sandbox_refuses_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    question = mock.Mock(spec=control.Open, cores=(2, 3))
    assert Child([]).answer(question) == control.Refused(
        kind="ResourceError",
        message="the system refuses a stage's process the cores 2, 3 (Operation not permitted); with "
        "--threads it chooses the cores itself",
    )
