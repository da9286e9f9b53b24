"""What several modules of this folder share."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from llorch_serve.artifact.folder import Artifact
from llorch_serve.runtime.session import DecoderSession
from support.fakes.played_memory import PlayedMemory
from support.harness.played_device import open_played


@pytest.fixture
def memory() -> PlayedMemory:
    """The memory of a device that the CPU plays."""
    return PlayedMemory()


@pytest.fixture
def opened(artifact: Artifact, memory: PlayedMemory) -> Callable[..., DecoderSession]:
    """Opens a module's artifact on that device."""
    return functools.partial(open_played, artifact, memory)
