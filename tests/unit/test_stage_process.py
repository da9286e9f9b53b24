"""A strict sandbox does not keep a stage's process from starting."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from llorch_serve.stages.child import let_worker_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors and policies are Linux's here")


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
