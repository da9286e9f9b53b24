"""What answers the paths of files and batches, where a worker keeps them and where it does not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from llorch_serve.http.batches.batch_routes import BatchRoutes
from llorch_serve.http.batches.file_routes import FileRoutes
from llorch_serve.http.batches.service import BatchService
from llorch_serve.http.origins import Origins
from llorch_serve.http.problems import HttpError
from llorch_serve.http.service import HttpService
from llorch_serve.http.unknown_fields import UnknownFields

Endpoint = ASGIApp | Callable[[Request], Awaitable[Response]]


def batch_endpoints(
    service: HttpService, batches: BatchService, origins: Origins, unknown: UnknownFields
) -> Mapping[str, Endpoint]:
    """Return what answers each path. origins: web pages that may call. unknown: see HttpSettings."""
    files = FileRoutes(service, batches, origins, unknown)
    made = BatchRoutes(service, batches, origins, unknown)
    return {
        "/v1/files": files.all,
        "/v1/files/{file_id}": files.one,
        "/v1/files/{file_id}/content": files.content,
        "/v1/batches": made.all,
        "/v1/batches/{batch_id}": made.one,
        "/v1/batches/{batch_id}/cancel": made.cancel,
    }


async def _absent(_request: Request) -> Response:
    found = "this worker keeps no files and no batches; start it with --batch-folder DIR"
    raise HttpError(404, "not_found", found)


NO_BATCHES: Final[Mapping[str, Endpoint]] = dict.fromkeys(
    (
        "/v1/files",
        "/v1/files/{file_id}",
        "/v1/files/{file_id}/content",
        "/v1/batches",
        "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/cancel",
    ),
    _absent,
)
"""What answers the same paths of a worker that was not told to keep any."""
