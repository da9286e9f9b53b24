"""Routes of batches: begun, listed, described and cancelled.

Input: requests, and the batches of whoever sends them. Output: OpenAI's objects.
"""

from __future__ import annotations

import functools
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from llorch_serve.http.batches.file_routes import list_of, noting_ignored, owner_of
from llorch_serve.http.batches.reading import BATCHES, AskedBatch, read_batch
from llorch_serve.http.batches.records import (
    BatchRecord,
    Status,
    new_batch_id,
    new_file_id,
)
from llorch_serve.http.batches.service import BatchService
from llorch_serve.http.exchange import Exchange
from llorch_serve.http.ignored_fields import IgnoredFields
from llorch_serve.http.origins import Origins
from llorch_serve.http.problems import HttpError
from llorch_serve.http.service import HttpService
from llorch_serve.http.status_routes import json_response
from llorch_serve.http.unknown_fields import UnknownFields

_CAN_BE_CANCELLED: Final = frozenset({Status.VALIDATING, Status.IN_PROGRESS})
_IS_CANCELLED: Final = frozenset({Status.CANCELLING, Status.CANCELLED})


class BatchRoutes:
    """The handlers. origins: web pages that may call. unknown: what becomes of fields that are not known."""

    def __init__(
        self, service: HttpService, batches: BatchService, origins: Origins, unknown: UnknownFields
    ) -> None:
        self._service = service
        self._batches = batches
        self._store = batches.store
        self._origins = origins
        self._unknown = unknown
        self._told = IgnoredFields()

    async def all(self, request: Request) -> Response:
        """/v1/batches: GET the list, or POST a batch."""
        if request.method == "POST":
            return await self._begin(request)
        page, _ = BATCHES.read(request.query_params)
        list_batches = functools.partial(self._store.list_batches, owner_of(request), page)
        found, has_more = await self._batches.asked(list_batches)
        return json_response(list_of([self._now(batch).document() for batch in found], has_more=has_more))

    async def one(self, request: Request) -> Response:
        """GET /v1/batches/ID."""
        name, owner = request.path_params["batch_id"], owner_of(request)
        batch = await self._batches.asked(lambda: self._store.batch(name, owner))
        return json_response(self._now(batch).document())

    async def cancel(self, request: Request) -> Response:
        """POST /v1/batches/ID/cancel: what has been answered becomes files all the same."""
        self._origins.check_sender(request.headers)
        name, owner = request.path_params["batch_id"], owner_of(request)
        batch = await self._batches.asked(functools.partial(self._cancel, name, owner))
        if batch.status not in _IS_CANCELLED:
            found = (
                f"{batch.id} is {batch.status.value}; only one that is validated or in progress is cancelled"
            )
            raise HttpError(400, "batch_has_ended", found)
        self._batches.look()
        return json_response(self._now(batch).document())

    def _cancel(self, name: str, owner: str) -> BatchRecord:
        batch = self._now(self._store.batch(name, owner))
        return self._store.move(batch.id, Status.CANCELLING, _CAN_BE_CANCELLED, counts=batch.counts)

    async def _begin(self, request: Request) -> Response:
        self._service.check_open()
        exchange = Exchange(request.scope, request.receive, _unused)
        ignored: list[str] | None = [] if self._unknown is UnknownFields.IGNORE else None
        asked = read_batch(await exchange.read_body(self._service.bodies), ignored)
        self._told.note(ignored or ())
        batch = await self._batches.asked(functools.partial(self._add, asked, owner_of(request)))
        self._batches.look()
        return json_response(noting_ignored(batch.document(), ignored))

    def _add(self, asked: AskedBatch, owner: str) -> BatchRecord:
        """Keep a batch, to be checked and run. Raises InvalidRequestError without its input."""
        info = self._service.info
        assert info is not None
        batch = BatchRecord(
            id=new_batch_id(),
            owner=owner,
            number=0,
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            seconds=asked.seconds,
            created_at=self._store.now(),
            output_file_id=new_file_id(),
            error_file_id=new_file_id(),
            metadata=asked.metadata,
            output_seconds=asked.output_seconds,
            model=(info.served_names or (info.model_id,))[0],
        )
        return self._store.add_batch(batch)

    def _now(self, batch: BatchRecord) -> BatchRecord:
        return self._batches.now(batch)


async def _unused(_message: Message) -> None:
    """Nothing is sent through it: the handler returns a response."""
