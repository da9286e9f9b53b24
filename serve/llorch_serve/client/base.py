"""What the blocking client and the one for asyncio share: a channel, how calls are sent on it, and errors."""

from __future__ import annotations

from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from llorch_serve.client.calls import Call
from llorch_serve.client.channel import Access
from llorch_serve.client.proxy import DIRECT, host_of, is_loopback, proxy_variable
from llorch_serve.errors import LlorchError, UnavailableError, UnreachableError, WorkerError
from llorch_serve.rpc import SERVICE_NAME, worker_pb2_grpc
from llorch_serve.rpc.status import read_status

AGAIN_S: Final = 0.1
"""Before a client asks for health again, where too many others do."""


class BaseWorkerClient:
    """Sends calls to the worker at ``address`` (HOST:PORT), with what ``access`` shows.

    grpc_api: ``grpc`` or ``grpc.aio``; what is returned here is what its channels return.
    """

    def __init__(
        self, address: str, access: Access, grpc_api: Any, options: tuple[tuple[str, int], ...]
    ) -> None:
        self.address = address
        if is_loopback(address):
            options = (*options, DIRECT)
        self._proxy = proxy_variable(address)
        self._metadata = access.metadata()
        credentials = access.credentials()
        self._channel: Any = (
            grpc_api.insecure_channel(address, options=options)
            if credentials is None
            else grpc_api.secure_channel(address, credentials, options=options)
        )
        stub: Any = worker_pb2_grpc.GenerationServiceStub
        self._service: Any = stub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def _start(self, call: Call[Any]) -> Any:
        """Send a call."""
        method = getattr(self._service, call.method)
        return method(call.message, timeout=call.timeout_s, metadata=(*self._metadata, *call.ids))

    def _watch_health(self, timeout_s: float | None = None) -> Any:
        """Begin to watch whether the worker serves, as soon as one answers."""
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        return self._health.Watch(request, timeout=timeout_s, wait_for_ready=True)

    def _error(self, error: grpc.RpcError) -> LlorchError:
        """Return the error of ours that a failed call stands for."""
        return self._with_proxy(read_status(error, address=self.address))

    def _not_ready(self, timeout_s: float, *, answered: bool) -> LlorchError:
        """Return the error of a worker that does not serve in time. answered: its health service does."""
        if answered:
            return UnavailableError(
                f"the worker at {self.address} is not ready after {timeout_s:g} s; wait longer, or see its "
                f"log"
            )
        return self._with_proxy(
            UnreachableError(
                f"no worker answers at {self.address} after {timeout_s:g} s; start one with: llorch serve "
                "DIR, or correct the address"
            )
        )

    def _with_proxy(self, error: LlorchError) -> LlorchError:
        """Return the error, which also says where a proxy is in the way that nobody may have thought of."""
        if self._proxy is None or not isinstance(error, WorkerError):
            return error
        return type(error)(
            f"{error}; the call went through the proxy that {self._proxy} names: "
            f"set no_proxy={host_of(self.address)} to call the worker directly"
        )


def is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    """Tell whether a worker says that it serves."""
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
