"""Routes of files: sent, listed, described, read and deleted.

Input: requests, and the files of whoever sends them. Output: OpenAI's objects, and content as it was sent.
What is sent goes to the disk as it comes.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, BinaryIO, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from llorch_serve.errors import QueueFullError
from llorch_serve.http.batches.reading import FILES
from llorch_serve.http.batches.service import BatchService
from llorch_serve.http.batches.uploads import MAX_FILE_BYTES, MAX_FORM_BYTES, Upload, too_large
from llorch_serve.http.exchange import CALLER
from llorch_serve.http.ignored_fields import IgnoredFields
from llorch_serve.http.origins import Origins
from llorch_serve.http.problems import CLIENT_CLOSED, HttpError
from llorch_serve.http.service import HttpService
from llorch_serve.http.status_routes import json_response
from llorch_serve.http.unknown_fields import UnknownFields

MOST_UPLOADS: Final = 8
"""At once, of all callers."""
MOST_UPLOADS_EACH: Final = 4
"""At once, of one caller."""
PIECE_TIMEOUT_S: Final = 30.0
"""Between two pieces of a body."""
MIN_BYTES_PER_S: Final = 16 * 2**10
"""Of a body as a whole, after the first PIECE_TIMEOUT_S."""

_WRITTEN_BYTES: Final = 2**20  # that are given to a thread at once
_READ_BYTES: Final = 256 * 2**10


class FileRoutes:
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
        self._uploads: Counter[str] = Counter()  # that are under way, by owner

    async def all(self, request: Request) -> Response:
        """/v1/files: GET the list, or POST a file."""
        if request.method == "POST":
            return await self._send(request)
        page, purpose = FILES.read(request.query_params)
        list_files = functools.partial(self._store.list_files, owner_of(request), page, purpose)
        found, has_more = await self._batches.asked(list_files)
        return json_response(list_of([file.document() for file in found], has_more=has_more))

    async def one(self, request: Request) -> Response:
        """/v1/files/ID: GET what it is, or DELETE it."""
        name, owner = request.path_params["file_id"], owner_of(request)
        if request.method == "DELETE":
            await self._batches.asked(lambda: self._store.delete_file(name, owner))
            return json_response({"id": name, "object": "file", "deleted": True})
        file = await self._batches.asked(lambda: self._store.file(name, owner))
        return json_response(file.document())

    async def content(self, request: Request) -> Response:
        """GET /v1/files/ID/content."""
        name, owner = request.path_params["file_id"], owner_of(request)
        opened = await self._batches.asked(lambda: self._store.open_file(name, owner))
        # No browser shows it, whatever it holds.
        headers = {
            "Content-Length": str(os.fstat(opened.fileno()).st_size),
            "Content-Disposition": "attachment",
        }
        return StreamingResponse(self._pieces(opened), media_type="application/octet-stream", headers=headers)

    async def _pieces(self, opened: BinaryIO) -> AsyncIterator[bytes]:
        with opened:
            while piece := await self._batches.asked(lambda: opened.read(_READ_BYTES)):
                yield piece

    async def _send(self, request: Request) -> Response:
        """Keep a file that is sent."""
        self._service.check_open()
        self._origins.check_sender(request.headers)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > MAX_FILE_BYTES + MAX_FORM_BYTES:
            raise too_large()
        owner = owner_of(request)
        if self._uploads.total() >= MOST_UPLOADS or self._uploads[owner] >= MOST_UPLOADS_EACH:
            found = f"{self._uploads[owner]} files of yours and {self._uploads.total()} in all are being sent"
            most = f"the most are {MOST_UPLOADS_EACH} and {MOST_UPLOADS}"
            raise QueueFullError(f"{found}, {most}; try again", retry_after_s=1.0)
        self._uploads[owner] += 1
        try:
            with self._service.call():
                return json_response(await self._receive(request))
        finally:
            self._uploads[owner] -= 1
            self._uploads += Counter()  # forgets those that have none

    async def _receive(self, request: Request) -> dict[str, Any]:
        """Take a body to its end; return the file that it has become."""
        ignore = self._unknown is UnknownFields.IGNORE
        declared = request.headers.get("content-length", "")
        kind = request.headers.get("content-type", "")
        asked = self._batches.asked
        owner = owner_of(request)
        if declared.isdecimal():  # a refusal now spares its bytes
            await asked(lambda: self._store.check_room(owner, max(0, int(declared) - MAX_FORM_BYTES)))
        upload = await asked(lambda: Upload(self._store, owner, kind, ignore_unknown=ignore))
        try:
            async for piece in _joined(request):
                await asked(functools.partial(upload.write, piece))
            file = await asked(upload.finish)
            self._told.note(upload.ignored)
            return noting_ignored(file.document(), upload.ignored)
        finally:
            await asked(upload.abandon)


async def _joined(request: Request) -> AsyncIterator[bytes]:
    """Yield the body in pieces worth a thread. Raises HttpError where it is too slow or cut off."""
    pieces, size, total = [], 0, 0
    now = asyncio.get_running_loop().time
    begun = now()
    stream = request.stream()
    try:
        while True:
            whole = asyncio.timeout_at(begun + PIECE_TIMEOUT_S + total / MIN_BYTES_PER_S)
            async with whole, asyncio.timeout(PIECE_TIMEOUT_S):
                piece = await anext(stream, None)
            if piece is not None:
                pieces.append(piece)
                size += len(piece)
                total += len(piece)
            if size >= _WRITTEN_BYTES or (piece is None and pieces):
                yield b"".join(pieces)
                pieces, size = [], 0
            if piece is None:
                return
    except TimeoutError as error:
        found = f"a body is sent with at least {MIN_BYTES_PER_S} bytes a second, and without pauses"
        raise HttpError(408, "timeout", f"{found}; send it again", (("Connection", "close"),)) from error
    except ClientDisconnect as error:
        raise HttpError(
            CLIENT_CLOSED, "client_closed", "the client left before its body was whole"
        ) from error


def owner_of(request: Request) -> str:
    """Return who asks, where the worker knows its callers; else empty."""
    return str(request.scope.get(CALLER, ""))


def noting_ignored(document: dict[str, Any], ignored: list[str] | None) -> dict[str, Any]:
    """Return an answer that tells which fields of the request were left aside, if any were."""
    return document | {"llorch": {"ignored": ignored}} if ignored else document


def list_of(documents: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return OpenAI's list."""
    return {
        "object": "list",
        "data": documents,
        "first_id": documents[0]["id"] if documents else None,
        "last_id": documents[-1]["id"] if documents else None,
        "has_more": has_more,
    }
