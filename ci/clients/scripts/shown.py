"""What every client's script shows: a row each, as a JSON line that the runner reads.

Two workers are there: REAL serves SmolLM2-135M-Instruct, and SCRIPTED a tiny model whose thoughts, calls and
answers are known (tests/support/builders/scripted_model.py).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Served:
    """A worker: its address, and the model that it serves."""

    root: str
    model: str

    @property
    def url(self) -> str:
        """What clients call the base URL."""
        return f"{self.root}/v1"

    def running(self) -> int:
        """Return how many answers it is at."""
        with urllib.request.urlopen(f"{self.root}/load", timeout=10) as answer:  # noqa: S310 - our own worker
            return int(json.load(answer)["running"])


REAL = Served(os.environ["REAL_URL"], os.environ["REAL_MODEL"])
SCRIPTED = Served(os.environ["SCRIPTED_URL"], os.environ["SCRIPTED_MODEL"])
KEY = "not-asked-for"
CAPITAL = "What is the capital of France?"
TALK = "Paris is the capital of France."
WEATHER = "What is the weather in Paris?"
WEATHER_TWICE = "Tell me the weather of both, Rome and Oslo."
AFTER = "It is sunny in Paris."
COUNT = "Please count without an end."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "adult": {"type": "boolean"}},
    "required": ["name", "adult"],
    "additionalProperties": False,
}


def row(name: str, show: Callable[[], object], holds: Callable[[Any], bool]) -> None:
    """Show one thing: what ``show`` returns, and whether ``holds`` is true of it."""
    try:
        saw = show()
        told: dict[str, object] = {"row": name, "holds": bool(holds(saw)), "saw": repr(saw)[:2000]}
    except Exception:  # noqa: BLE001 - whatever a client raises is what the row shows
        told = {"row": name, "holds": False, "saw": traceback.format_exc()[-2000:]}
    sys.stdout.write(f"\n{json.dumps(told)}\n")
    sys.stdout.flush()


def refusal(call: Callable[[], object]) -> str:
    """Return the text of what a call raises; fails if it raises nothing."""
    try:
        found = call()
    except Exception as error:  # noqa: BLE001 - clients have errors of their own
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"expected an error, found {found!r}")


def posted(served: Served, path: str, **body: object) -> dict[str, Any]:
    """Return what a worker answers to a body of JSON."""
    request = urllib.request.Request(  # noqa: S310 - our own worker
        f"{served.root}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return dict(json.load(answer))


def idle(served: Served = SCRIPTED, limit_s: float = 10.0) -> bool:
    """Wait until a worker is at no answer; tell whether that came about."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if served.running() == 0:
            return True
        time.sleep(0.05)
    return False
