"""The routes of the HTTP front, put together.

Input: the service and whoever keeps records. Output: one ASGI application, for a guard and uvicorn around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from llorch_serve.errors import LlorchError
from llorch_serve.http.batches.routes import NO_BATCHES, Endpoint
from llorch_serve.http.embedding_routes import embeddings_dialect
from llorch_serve.http.job_routes import JobDialect
from llorch_serve.http.messages.routes import counting, messages_dialect, versioned
from llorch_serve.http.openai_routes import chat_dialect, completions_dialect
from llorch_serve.http.openapi import openapi
from llorch_serve.http.operations import OPERATIONS
from llorch_serve.http.page import PAGE_PATHS, page_file
from llorch_serve.http.paths import nearest_path
from llorch_serve.http.problems import HttpError, describe
from llorch_serve.http.rank_routes import rerank_dialect
from llorch_serve.http.responses.kept import KeptResponses
from llorch_serve.http.responses.routes import ResponseRoutes
from llorch_serve.http.score_routes import score_dialect
from llorch_serve.http.service import Computation, ComputedRoute, Dialect, GenerationRoute, HttpService
from llorch_serve.http.shapes import refusal_body
from llorch_serve.http.status_routes import (
    Exposition,
    LookAtReplicas,
    StatusRoutes,
    json_response,
    no_replicas,
)
from llorch_serve.http.token_routes import detokenize, tokenize
from llorch_serve.http.unknown_fields import UnknownFields

OPEN_PATHS: Final = frozenset({"/health", "/openapi.json", *PAGE_PATHS})
"""Paths that need no token: they hold nothing of the model or its users."""


def make_routes(
    service: HttpService,
    exposition: Exposition,
    unknown: UnknownFields = UnknownFields.REFUSE,
    replicas: LookAtReplicas = no_replicas,
    batches: Mapping[str, Endpoint] = NO_BATCHES,
) -> ASGIApp:
    """Return the application without what guards its door. unknown: see HttpSettings. batches: what answers
    their paths, and those of files.
    """
    status, jobs = StatusRoutes(service, exposition, replicas), JobDialect()
    responses = ResponseRoutes(KeptResponses(), unknown)

    def generates(path: str, dialect: Dialect) -> ASGIApp:
        return GenerationRoute(service, dialect, path)

    def computes(path: str, computation: Computation) -> ASGIApp:
        return ComputedRoute(service, computation, path)

    endpoints: dict[str, Callable[[str], Endpoint]] = {
        "/v1/completions": lambda path: generates(path, completions_dialect(unknown)),
        "/v1/chat/completions": lambda path: generates(path, chat_dialect(unknown)),
        "/v1/responses": lambda path: generates(path, responses.dialect()),
        "/v1/responses/input_tokens": lambda path: computes(path, responses.count),
        "/v1/responses/{response_id}": lambda _: responses.one,
        "/v1/messages": lambda path: versioned(generates(path, messages_dialect(unknown))),
        "/v1/messages/count_tokens": lambda path: versioned(computes(path, counting(unknown))),
        "/v1/score": lambda path: generates(path, score_dialect()),
        "/v1/embeddings": lambda path: generates(path, embeddings_dialect(unknown)),
        "/v1/rerank": lambda path: generates(path, rerank_dialect(unknown)),
        "/tokenize": lambda path: computes(path, tokenize),
        "/detokenize": lambda path: computes(path, detokenize),
        "/v1/inference": lambda path: generates(path, jobs),
        "/execute": lambda path: generates(path, jobs),
        "/cancel": lambda _: status.cancel,
        "/health": lambda _: status.health,
        "/load": lambda _: status.load,
        "/metrics": lambda _: status.metrics,
        "/openapi.json": lambda _: openapi,
        "/v1/models": lambda _: status.models,
        "/v1/models/{model_id}": lambda _: status.model,
    }
    endpoints |= {path: lambda path: batches[path] for path in batches}
    routes = _routes(endpoints | dict.fromkeys(PAGE_PATHS, lambda _: page_file))
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: _refuse, LlorchError: _refuse, Exception: _refuse}
    )
    app.router.redirect_slashes = False  # clients of JSON do not send their body again
    return app


def _routes(endpoints: Mapping[str, Callable[[str], Endpoint]]) -> list[Route]:
    """Return a route for each path of the table of operations. endpoints: what answers each, of its path."""
    methods: dict[str, list[str]] = {}
    for operation in OPERATIONS:
        methods.setdefault(operation.path, []).append(operation.method)
    assert methods.keys() == endpoints.keys(), "every operation has an endpoint, and no other path is served"
    return [
        # A model's name may hold slashes.
        Route(path.replace("{model_id}", "{model_id:path}"), endpoints[path](path), methods=allowed)
        for path, allowed in methods.items()
    ]


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer an error outside of generation in the shape that the route's clients read."""
    path = request.url.path
    if isinstance(error, HTTPException):
        error = _http_error(error, request.method, path, request.app.routes)
    problem = describe(error, route=path)
    response = json_response(refusal_body(problem, path), problem.status)
    response.headers.update(dict(problem.headers))
    return response


def _http_error(error: HTTPException, method: str, path: str, routes: Sequence[BaseRoute]) -> HttpError:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        found = f"{method} is not what {path[:200]} takes; use {allowed}"
        return HttpError(405, "method_not_allowed", found, (("Allow", allowed),))
    right = nearest_path(path, _paths_of(routes))
    hint = f"call {right}" if right else "docs/http.md lists what is"
    return HttpError(error.status_code, "not_found", f"nothing is served at {path[:200]}; {hint}")


def _paths_of(routes: Sequence[BaseRoute]) -> frozenset[str]:
    """Return the paths that are served, but for those that hold a name."""
    return frozenset(route.path for route in routes if isinstance(route, Route) and "{" not in route.path)
