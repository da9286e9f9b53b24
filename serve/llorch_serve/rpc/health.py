"""grpc.health.v1 for anybody: what a worker says about itself, without ever waiting for whom it says it to.

A call whose message is not received in time is answered all the same, as one that names no service: others'
large messages must not cost it the answer.

Setting a status marks it and wakes the watchers; each of them writes in its own call. A client that takes
nothing is cut, and the number of calls is bounded: see ``rpc/call_limit.py`` for which one is evicted or
refused. A client whose watch is evicted asks again and is told the status at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from llorch_serve.errors import FieldViolation, InvalidRequestError, QueueFullError, RequestError
from llorch_serve.rpc.call_limit import CallLimit, Context
from llorch_serve.rpc.receiving import SmallReceiving
from llorch_serve.rpc.sending import Sending
from llorch_serve.rpc.status import write_status

NAME: Final = "grpc.health.v1.Health"

MAX_WATCHERS: Final = 128
KEPT_S: Final = 10.0  # for a watch of a connection that has most, before another of it may take its place
MAX_CHECKS: Final = 64  # at once; one takes milliseconds
MESSAGE_S: Final = 0.005  # for a message that was sent with its call to arrive, while others wait
DISTRUST_S: Final = 10.0  # after a large message, in which none is received


class Health:
    """NOT_SERVING at first, of the services with these names. Made and used on one event loop."""

    def __init__(self, services: Iterable[str], sending: Sending) -> None:
        self._sending = sending
        self._services = frozenset(services)
        self._status = HealthCheckResponse.NOT_SERVING
        self._ended = False
        self._watches, self._checks = CallLimit(MAX_WATCHERS, kept_s=KEPT_S), CallLimit(MAX_CHECKS)
        self._messages = SmallReceiving(MESSAGE_S, DISTRUST_S)
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def serve(self) -> None:
        """Say SERVING, unless :meth:`end` came first."""
        if not self._ended:
            self._set(HealthCheckResponse.SERVING)

    def pause(self) -> None:
        """Say NOT_SERVING until :meth:`serve`."""
        self._set(HealthCheckResponse.NOT_SERVING)

    def end(self) -> None:
        """Say NOT_SERVING for good."""
        self._ended = True
        self._set(HealthCheckResponse.NOT_SERVING)

    def method_handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Return the service's methods by name, for registration with a server."""
        return {
            name: grpc.stream_stream_rpc_method_handler(
                self._with_status(body), response_serializer=HealthCheckResponse.SerializeToString
            )
            for name, body in (("Check", self._check), ("Watch", self._watch))
        }

    def _set(self, status: HealthCheckResponse.ServingStatus.ValueType) -> None:
        self._status = status
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    async def _check(self, context: Context) -> None:
        with self._checks.hold(context) as held:
            if await self._is_known(context):
                await self._tell(context, self._status, held.evicted)
            else:
                await self._sending.send(context, context.abort(grpc.StatusCode.NOT_FOUND))

    async def _watch(self, context: Context) -> None:
        with self._watches.hold(context) as held:
            known = await self._is_known(context)
            told = None
            while not held.evicted.done():
                changed = self._changed
                status = self._status if known else HealthCheckResponse.SERVICE_UNKNOWN
                if status != told:
                    await self._tell(context, status, held.evicted)
                    told = status
                await asyncio.wait((changed, held.evicted), return_when=asyncio.FIRST_COMPLETED)
        raise QueueFullError(
            f"others watch too, and this worker takes {MAX_WATCHERS} at once; watch again", retry_after_s=1.0
        )

    async def _is_known(self, context: Context) -> bool:
        """Tell whether a call names a service of the worker, or its message is not received."""
        try:
            request = HealthCheckRequest.FromString(await self._messages.message(context))
        except QueueFullError:
            return True
        except DecodeError as error:
            found = f"not a valid HealthCheckRequest ({error}); expected one of {NAME}"
            raise InvalidRequestError([FieldViolation("request", found)]) from error
        return request.service in self._services

    async def _tell(
        self,
        context: Context,
        status: HealthCheckResponse.ServingStatus.ValueType,
        evicted: asyncio.Future[None],
    ) -> None:
        await self._sending.send(context, context.write(HealthCheckResponse(status=status)), evicted=evicted)

    def _with_status(
        self, body: Callable[[Context], Awaitable[None]]
    ) -> Callable[[object, Context], Awaitable[None]]:
        async def handle(_requests: object, context: Context) -> None:
            try:
                await body(context)
                return
            except RequestError as error:
                status = write_status(error, method=NAME)
            await self._sending.send(context, context.abort(*status))

        return handle
