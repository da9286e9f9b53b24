"""Files and batches as a part of the HTTP front, which they live and end with.

Input: the settings, None where a worker keeps none, and the routes that answer lines. Output: what answers
the paths of files and batches, and batches that run.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp

from llorch_serve.batch.answering import Answerer
from llorch_serve.http.batches.records import BatchRecord
from llorch_serve.http.batches.routes import NO_BATCHES, Endpoint, batch_endpoints
from llorch_serve.http.batches.service import BatchService
from llorch_serve.http.batches.settings import BatchSettings
from llorch_serve.http.batches.work import BatchWork
from llorch_serve.http.inner import AskingRun, InnerAnswerer
from llorch_serve.http.origins import Origins
from llorch_serve.http.service import HttpService
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.requests import TextGenerator


class FrontBatches:
    """Made on the front's event loop; does nothing without settings."""

    def __init__(
        self,
        settings: BatchSettings | None,
        service: HttpService,
        origins: Origins,
        unknown: UnknownFields,
    ) -> None:
        self._settings = settings
        self._batches = None if settings is None else BatchService(settings)
        self.endpoints: Mapping[str, Endpoint] = NO_BATCHES
        if self._batches is not None:
            self.endpoints = batch_endpoints(service, self._batches, origins, unknown)

    async def open(self) -> None:
        """Take the folder. Raises UsageError if it cannot be used."""
        if self._batches is not None:
            await self._batches.open()

    def start(self, generator: TextGenerator, routes: ASGIApp) -> None:
        """Run batches from now on. routes: those that answer lines."""
        if self._batches is None or self._settings is None:
            return

        def answerer(batch: BatchRecord, run_id: str) -> Answerer:
            # Of a client of its own: the queue has it take turns with its owner's other requests.
            run = AskingRun(run_id, batch.owner, f"batches:{batch.owner}", created=None)
            return InnerAnswerer(routes, run)

        # One slot is left for whoever waits for an answer, where there are several.
        in_flight = self._settings.in_flight or max(1, generator.load().slots - 1)
        work = BatchWork(
            self._batches.store,
            self._batches.blocking,
            answerer,
            lambda: generator.model_info().fingerprint,
            in_flight,
        )
        self._batches.start(work)

    async def stop(self) -> None:
        """Break off what runs; the next worker with this folder goes on with it."""
        if self._batches is not None:
            await self._batches.stop()

    async def close(self) -> None:
        """Stop, and let others use the folder."""
        if self._batches is not None:
            await self._batches.close()
