"""A replica without a model, for tests of what Ray does with replicas."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from llorch_serve.cluster.settings import read_settings


class TrivialReplica:
    """Says who it is. A model id of ``broken`` cannot be started."""

    def __init__(self, settings: bytes) -> None:
        self._settings = read_settings(settings)
        if self._settings.artifact == "/broken":
            raise ValueError("the artifact in /broken is damaged; export it again")

    def reconfigure(self, settings: object) -> None:
        """Take note of what the deployment shows."""

    def check_health(self) -> None:
        """Be well."""

    async def who(self) -> tuple[int, str]:
        """Return the process's number and the fingerprint that it was started with."""
        return os.getpid(), self._settings.fingerprint

    async def count(self, parts: int, pause_s: float) -> AsyncIterator[bytes]:
        """Give so many parts, with a pause before each."""
        for part in range(parts):
            await asyncio.sleep(pause_s)
            yield f"{self._settings.fingerprint[:1]}{part}".encode()
