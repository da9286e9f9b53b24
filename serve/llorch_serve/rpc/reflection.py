"""grpc.reflection.v1alpha: what services there are, one answer at a time, to clients that ask and take what
they asked for.

The answers are those of gRPC's own servicer, which by itself lets a call wait for its client for as long as
that likes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import grpc
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from llorch_serve.errors import QueueFullError
from llorch_serve.rpc.call_limit import CallLimit, Context, until
from llorch_serve.rpc.sending import Sending
from llorch_serve.rpc.status import write_status

NAME: Final = "grpc.reflection.v1alpha.ServerReflection"

MAX_CALLS: Final = 8
IDLE_S: Final = 10.0  # after which a call that asks nothing more has ended well


class Reflection:
    """Tells of the services with these names."""

    def __init__(self, services: Iterable[str], sending: Sending) -> None:
        self._sending = sending
        self._answers = reflection.aio.ReflectionServicer(tuple(services))
        self._calls = CallLimit(MAX_CALLS)

    def method_handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Return the service's methods by name, for registration with a server."""
        return {
            "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
                self._reflect,
                request_deserializer=ServerReflectionRequest.FromString,
                response_serializer=ServerReflectionResponse.SerializeToString,
            )
        }

    async def _reflect(self, _requests: object, context: Context) -> None:
        with self._calls.hold(context) as held:
            while not held.evicted.done():
                read = await until(context.read(), evicted=held.evicted, limit_s=IDLE_S)
                if held.evicted.done():
                    break
                if not read.done() or (request := read.result()) is grpc.aio.EOF:
                    return
                async for answer in self._answers.ServerReflectionInfo(_only(request), context):
                    await self._sending.send(context, context.write(answer), evicted=held.evicted)
        error = QueueFullError(
            f"others ask for reflection too, and this worker takes {MAX_CALLS} calls at once; ask again",
            retry_after_s=1.0,
        )
        await self._sending.send(context, context.abort(*write_status(error, method=NAME)))


async def _only(request: ServerReflectionRequest) -> AsyncIterator[ServerReflectionRequest]:
    yield request
