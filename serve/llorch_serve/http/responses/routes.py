"""Routes of the Responses API: answers, those that are kept, and counts of tokens.

Input: bodies of POST /v1/responses and of /v1/responses/input_tokens, and ids of answers. Output: answers of
the model, and answers that were kept.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llorch_serve.calls.callers import Caller
from llorch_serve.http.exchange import CALLER
from llorch_serve.http.ignored_fields import noting
from llorch_serve.http.problems import HttpError, Problem
from llorch_serve.http.prompt_bodies import count_tokens
from llorch_serve.http.responses.answers import ResponseAnswer
from llorch_serve.http.responses.kept import KeptResponses
from llorch_serve.http.responses.reading import read_response
from llorch_serve.http.status_routes import json_response
from llorch_serve.http.translated.answering import TranslatedDialect
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.requests import ModelInfo, TextGenerator

_PIECE_BYTES: Final = 64 * 2**10
"""Of a kept answer, sent at once: what a client does not read is copied for its connection."""


class ResponseRoutes:
    """The handlers of what is kept, and the dialect that keeps it. unknown: what becomes of fields that are
    not known.
    """

    def __init__(self, kept: KeptResponses, unknown: UnknownFields) -> None:
        self._kept = kept
        self._read = noting(functools.partial(read_response, kept), unknown)

    def dialect(self) -> TranslatedDialect:
        """Return the dialect of POST /v1/responses."""
        return TranslatedDialect(
            self._read, functools.partial(ResponseAnswer, kept=self._kept), Problem.openai
        )

    async def one(self, request: Request) -> Response:
        """/v1/responses/ID: GET an answer that is kept, or DELETE it."""
        return self._delete(request) if request.method == "DELETE" else self._find(request)

    def _find(self, request: Request) -> Response:
        asked = [name for name in ("stream", "starting_after") if name in request.query_params]
        if asked:
            found = f"{asked[0]} was asked for, but an answer that is kept comes whole; leave it out"
            raise HttpError(400, "unsupported", found)
        name = request.path_params["response_id"]
        kept = self._kept.find(name, _owner(request))
        if kept is None:
            raise _not_kept(name)
        length = {"Content-Length": str(len(kept.document))}
        return StreamingResponse(_pieces(kept.document), media_type="application/json", headers=length)

    def _delete(self, request: Request) -> Response:
        name = request.path_params["response_id"]
        if not self._kept.delete(name, _owner(request)):
            raise _not_kept(name)
        return json_response({"id": name, "object": "response", "deleted": True})

    def count(self, raw: bytes, generator: TextGenerator, info: ModelInfo, caller: Caller) -> dict[str, Any]:
        """POST /v1/responses/input_tokens: how many tokens the model would be given."""
        count = count_tokens(self._read(raw, info, caller), generator)
        return {"object": "response.input_tokens", "input_tokens": count}


async def _pieces(document: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(document), _PIECE_BYTES):
        yield document[at : at + _PIECE_BYTES]


def _owner(request: Request) -> str:
    return str(request.scope.get(CALLER, ""))


def _not_kept(name: str) -> HttpError:
    bounds = "answers are for an hour, within bounds, unless store is false"
    return HttpError(404, "response_not_found", f"response {name[:100]!r} is not kept here: {bounds}")
