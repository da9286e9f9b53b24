"""A worker confined to one CPU stays there, and takes next to none of it when there is nothing to do."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import psutil
import pytest

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.requests import GenerationRequest, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from support.harness.processes import serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="affinity is set as Linux does")

WINDOW_S = 2.0


def threads_on(process: psutil.Process) -> set[int]:
    return {cpu for thread in process.threads() for cpu in os.sched_getaffinity(thread.id)}


def test_one_cpu_and_idle(tiny: Path) -> None:
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    os.sched_setaffinity(0, {one})  # the worker inherits it
    try:
        with serving(tiny) as worker:
            os.sched_setaffinity(0, allowed)
            request = GenerationRequest(
                "r", TokenPrompt((5, 6, 7)), SamplingParams(max_tokens=8, ignore_eos=True)
            )
            with WorkerClient(worker.address) as client:
                assert sum(len(update.token_ids) for update in client.generate(request)) == 8
            process = psutil.Process(worker.command.process.pid)
            assert threads_on(process) == {one}
            before = process.cpu_times()
            threading.Event().wait(WINDOW_S)  # what is measured is a time without work
            after = process.cpu_times()
    finally:
        os.sched_setaffinity(0, allowed)
    used = after.user + after.system - before.user - before.system
    assert used < 0.05 * WINDOW_S
