"""A bare grpc.aio server that answers health checks and does nothing else.

Checked beside a worker under attack, it says what of the worker's times is want of cores: both wait for one
as long as others run.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from llorch_serve.python_child import module_command
from support.harness.processes import with_scripts


@contextlib.contextmanager
def bare_health() -> Iterator[str]:
    """Run the server as a process of its own; yields HOST:PORT."""
    command = module_command(sys.executable, "measure.bare_health")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=with_scripts()) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


async def _serve() -> None:
    async def check(_asked: HealthCheckRequest, _context: Any) -> HealthCheckResponse:
        return HealthCheckResponse(status=HealthCheckResponse.SERVING)

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(
        check,
        request_deserializer=HealthCheckRequest.FromString,
        response_serializer=HealthCheckResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve())
