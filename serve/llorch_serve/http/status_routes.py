"""What a worker says of itself over HTTP: health, load, models and metrics.

Input: the service's state, and the generator's figures of its last step. Output: JSON, and Prometheus' text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeAlias

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from llorch_serve.engine.load import Load
from llorch_serve.errors import UnavailableError
from llorch_serve.http.exchange import Exchange
from llorch_serve.http.fields import read_struct
from llorch_serve.http.job_routes import CancelBody, check_job_id
from llorch_serve.http.openai_requests import check_model
from llorch_serve.http.service import HttpService
from llorch_serve.requests import ModelInfo

Exposition = Callable[[], tuple[bytes, str]]
"""Returns Prometheus' text and its content type."""


class ReplicaFigures(Protocol):
    """One replica of a front's."""

    @property
    def replica(self) -> str:
        """Its name."""

    @property
    def load(self) -> Load:
        """How busy it is."""

    @property
    def memory_bytes(self) -> int:
        """Resident memory of its process."""


LookAtReplicas: TypeAlias = Callable[[], Sequence[ReplicaFigures] | None]
"""Returns the replicas that run, as of the last look at them; None: the model runs in this process, or is not
there yet.
"""


def no_replicas() -> None:
    """Have the model run in this process."""


class StatusRoutes:
    """Handlers that need no engine step."""

    def __init__(
        self, service: HttpService, exposition: Exposition, replicas: LookAtReplicas = no_replicas
    ) -> None:
        self._service = service
        self._exposition = exposition
        self._replicas = replicas
        self._created = int(time.time())

    async def health(self, _request: Request) -> Response:
        """200 while requests are taken, 503 before and after; with where the model runs, once that is
        known.
        """
        refusal = self._service.refusal
        load = self._service.load()
        body = {"status": load.state.value, "reason": refusal, "load_percent": load.load_percent}
        if (info := self._service.info) is not None:
            body |= _placement(info)
        return json_response(body, 200 if refusal is None else 503)

    async def load(self, _request: Request) -> Response:
        """The worker's state, how far it has loaded, and how busy it is as of its last step; of a front, each
        replica too.
        """
        body = asdict(self._service.load())
        if not body["stages"]:  # of one graph there is nothing to tell
            del body["stages"]
        if (replicas := self._replicas()) is not None:
            body["replicas"] = [_figures(one) for one in replicas]
        return json_response(body)

    async def metrics(self, _request: Request) -> Response:
        """Prometheus' text."""
        content, kind = self._exposition()
        return Response(content, headers={"Content-Type": kind})

    async def models(self, _request: Request) -> Response:
        """The one model, as a list: an entry for each name that it was given."""
        info = self._info()
        names = info.served_names or (info.model_id,)
        return json_response({"object": "list", "data": [self._model(info, name) for name in names]})

    async def model(self, request: Request) -> Response:
        """The model, if it is asked for by one of its names."""
        info, name = self._info(), request.path_params["model_id"]
        if not name:
            raise HTTPException(404)
        check_model(name, info)
        return json_response(self._model(info, name))

    async def cancel(self, request: Request) -> Response:
        """End a job, if it is live."""
        exchange = Exchange(request.scope, request.receive, _unused)
        body = read_struct(await exchange.read_body(self._service.bodies), CancelBody, ignorable=False)
        check_job_id(body.job_id)
        await self._service.cancel(body.job_id, exchange.owner)
        return json_response({"job_id": body.job_id, "status": "cancelling"}, 202)

    def _info(self) -> ModelInfo:
        if self._service.info is None:
            raise UnavailableError(self._service.refusal or "")
        return self._service.info

    def _model(self, info: ModelInfo, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "llorch",
            "llorch": asdict(info),
        }


def _placement(info: ModelInfo) -> dict[str, Any]:
    shares = [
        {"provider": share.provider, "node_share": share.node_share, "weight_share": share.weight_share}
        for share in info.provider_shares
    ]
    return {"provider": info.provider, "device": info.device, "provider_shares": shares}


def _figures(one: ReplicaFigures) -> dict[str, Any]:
    load = one.load
    return {
        "replica": one.replica,
        "running": load.running,
        "waiting": load.waiting,
        "slots": load.slots,
        "tokens_per_second": load.tokens_per_second,
        "memory_bytes": one.memory_bytes,
    }


def json_response(body: object, status: int = 200) -> Response:
    """Return a response of JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _unused(_message: Message) -> None:
    """Nothing is sent through it: the handler returns a response."""
