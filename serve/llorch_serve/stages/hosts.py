"""Where a stage of this process runs. The ones in processes of their own are in ``process.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from llorch_serve.artifact.folder import Artifact
from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.config import SessionConfig
from llorch_serve.errors import StageEndedError
from llorch_serve.stages.calls import StagePort
from llorch_serve.stages.loading import StageLoader, StageRoom, StageSettings
from llorch_serve.stages.stage import LocalPort, Stage, StageFacts


class StageHost(Protocol):
    """Where one stage runs, from its beginning to its end."""

    def room(self) -> StageRoom:
        """Return what is there for it. Raises what opening a session raises."""

    def begin(self, lanes: Sequence[KvCapacity]) -> None:
        """Begin to load it. lanes: what each may hold. Raises what opening a session raises."""

    def facts(self) -> StageFacts:
        """Return what is known of it once it is loaded. Raises what opening a session raises."""

    def port(self, lane: int) -> StagePort:
        """Return it as a lane reaches it, once it is loaded."""

    def when_ended(self, tell: Callable[[StageEndedError], None]) -> None:
        """Have ``tell`` called, on any thread, if it ends before it is closed; at once if it has."""

    def close(self) -> None:
        """End it. Idempotent."""


HostOpener: TypeAlias = Callable[[Artifact, SessionConfig, int], Sequence[StageHost]]
"""Starts the stages of an artifact elsewhere, each for at most so many lanes, and returns their hosts."""


class LocalHost:
    """A stage in this process: loaded on the caller's thread, and run on those of the lanes."""

    def __init__(self, settings: StageSettings) -> None:
        self._loader = StageLoader(settings)
        self._stage: Stage | None = None

    def room(self) -> StageRoom:
        """See the protocol."""
        return self._loader.room()

    def begin(self, lanes: Sequence[KvCapacity]) -> None:
        """See the protocol."""
        self._stage = self._loader.load(lanes)

    def facts(self) -> StageFacts:
        """See the protocol."""
        return self._loaded().facts

    def port(self, lane: int) -> StagePort:
        """See the protocol."""
        return LocalPort(self._loaded(), lane)

    def when_ended(self, tell: Callable[[StageEndedError], None]) -> None:
        """See the protocol: it ends with this process."""

    def close(self) -> None:
        """See the protocol: its memory is free once nobody has a port of it."""
        self._stage = None

    def _loaded(self) -> Stage:
        assert self._stage is not None, "begin() loads it"
        return self._stage
