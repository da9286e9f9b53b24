"""``llorch bench``, or its process of an entry, with a stopwatch inside: ``watched.py LOG bench ...`` or
``watched.py LOG -P -m ...child``.

LOG gets a JSON line for each call: of the model (a :class:`stopwatch.ModelCall`), or of a worker (a
:class:`stopwatch.SeenCall`).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TextIO

import grpc

from llorch_serve import cli
from llorch_serve.bench import child
from support.harness.stopwatch import ClientStopwatch, watch_model


def measure_entry(log: TextIO) -> None:
    """Be the process of an entry."""
    watch_model(lambda call: print(json.dumps(asdict(call)), file=log))
    child.main()


def measure_worker(log: TextIO, arguments: list[str]) -> None:
    """Be the command."""
    watch = ClientStopwatch()
    inner = grpc.aio.insecure_channel
    grpc.aio.insecure_channel = lambda *args, **named: inner(*args, **named, interceptors=[watch])
    sys.argv = ["llorch", *arguments]
    try:
        cli.main()
    finally:
        for call in watch.calls:
            print(json.dumps(asdict(call)), file=log)


if __name__ == "__main__":
    with open(sys.argv[1], "w", buffering=1) as log:  # noqa: PTH123 - line by line, so that nothing is lost
        measure_entry(log) if "-m" in sys.argv[2:4] else measure_worker(log, sys.argv[2:])
