"""A device whose slots share a cache, played by the CPU: it has the options of CUDA's provider, which the CPU
takes and passes over, so that a step is recorded in name alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llorch_serve.artifact.folder import Artifact
from llorch_serve.config import SessionConfig
from llorch_serve.providers import CPU, ActiveProvider, Memory, ProviderChoice
from llorch_serve.providers.table import find_provider
from llorch_serve.runtime import opening
from llorch_serve.runtime.device_graph import DeviceGraph
from llorch_serve.runtime.opening import LoadReport, open_session
from llorch_serve.runtime.session import DecoderSession
from support.fakes.played_memory import PlayedMemory

PLAYED = replace(
    find_provider("cpu"),
    memory=Memory.DEVICE,
    in_place=False,
    divisible=True,
    options=find_provider("cuda").options,
)


def open_played(
    artifact: Artifact,
    memory: PlayedMemory,
    options: tuple[str, ...] = (),
    tell: Callable[[LoadReport], None] = lambda _report: None,
    *,
    allow_cpu_nodes: bool = False,
    **config: Any,
) -> DecoderSession:
    """Open an artifact on the device. options: ``KEY=VALUE``, of the provider."""
    choice = ProviderChoice("cuda", options, allow_cpu_nodes=allow_cpu_nodes)
    active = ActiveProvider(CPU, PLAYED, dict(option.split("=") for option in options))
    settings: dict[str, Any] = {"threads": 1, "slots": 3, **config}
    with pytest.MonkeyPatch.context() as patch:  # sessions that are opened later are on the CPU
        patch.setattr(opening, "device_memory", lambda _provider, _runtime: memory)
        patch.setattr(opening, "activate", lambda _choice, _runtime: active)
        return open_session(artifact, SessionConfig(provider=choice, **settings), tell)


class WatchedBinding:
    """A binding of onnxruntime's that notes what is bound, by name: where it is, its type, shape and
    address.
    """

    def __init__(self, io: Any) -> None:
        self.io = io
        self.bound: dict[str, tuple[Any, ...]] = {}

    def bind_input(self, name: str, *what: Any) -> None:
        self.bound[name] = what
        self.io.bind_input(name, *what)

    def bind_output(self, name: str, *what: Any) -> None:
        self.bound[name] = what
        self.io.bind_output(name, *what)


class Watched:
    """A session of onnxruntime's that notes which recording each call makes or replays.

    A replay reads and writes what was bound when it was recorded, and knows no other shape nor length; so it
    fails where any of that has changed.
    """

    def __init__(self, session: Any) -> None:
        self.session = session
        self.recordings: list[str | None] = []
        self.recorded: dict[str, tuple[Any, ...]] = {}

    def io_binding(self) -> WatchedBinding:
        return WatchedBinding(self.session.io_binding())

    def run_with_iobinding(self, io: WatchedBinding, options: Any) -> None:
        number = None if options is None else options.get_run_config_entry("gpu_graph_id")
        self.recordings.append(number)
        if number not in (None, "-1"):
            total = io.bound.get("total_sequence_length")
            told = None if total is None else ctypes.c_int32.from_address(total[-1]).value
            what = (dict(io.bound), told)
            assert self.recorded.setdefault(number, what) == what, "a replay would not see what has changed"
        self.session.run_with_iobinding(io.io, options)


def watched(session: DecoderSession) -> Watched:
    """Return the session's runtime session of steps and prompts, watched from now on."""
    graph = session._decode
    assert isinstance(graph, DeviceGraph)
    assert not graph._steps
    assert not graph._prompts._bindings, "bound before it was watched"
    found = Watched(graph._session)
    graph._session = graph._prompts._session = found
    return found


def watched_choice(session: DecoderSession) -> Watched:
    """Return the runtime session that chooses tokens, watched from now on."""
    graph = session._decode
    assert isinstance(graph, DeviceGraph)
    found = Watched(graph._choosers.greedy)
    graph._choosers = replace(graph._choosers, greedy=found)
    return found
