"""What a pool manager is told: one message when the worker is ready, then heartbeats. Both are JSON
objects.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Final

import msgspec
import psutil

from llorch_serve.cluster.totals import Totals
from llorch_serve.engine.load import Load, WorkerState
from llorch_serve.providers.nvidia import load_nvml, memory_of_process
from llorch_serve.providers.table import PROVIDERS
from llorch_serve.requests import ModelInfo

_ROWS: Final = {row.runtime_name: row for row in PROVIDERS}


class Ready(msgspec.Struct, frozen=True):
    """Sent once the worker serves, and again to a manager that has forgotten it.

    http_uri: of the HTTP front; None: there is none.
    memory_bytes: resident memory of this process, measured, and of its replicas.
    device_memory_bytes: what these hold of GPUs; None: the driver does not say, or there is none.
    memory_architecture: where the model's memory is: ``system``, the host's; ``discrete``, the device's own;
        ``unified``, both; or ``unknown``.
    capabilities: see :class:`llorch_serve.requests.ModelInfo`.
    worker_type: ``llorch``, or ``llorch-cluster`` of a front whose replicas run elsewhere.
    """

    worker_id: str
    model_ref: str
    uri: str
    http_uri: str | None
    backend: str
    device: str
    memory_bytes: int
    device_memory_bytes: int | None
    memory_architecture: str
    worker_type: str
    capabilities: tuple[str, ...]
    protocol: str
    version: str
    pid: int


class Heartbeat(msgspec.Struct, frozen=True):
    """Sent at intervals, and at once when the worker drains, stops or fails. timestamp: UTC, ISO 8601."""

    worker_id: str
    timestamp: str
    status: str
    load: Load


def ready(
    info: ModelInfo,
    *,
    worker_id: str,
    model_ref: str | None,
    uri: str,
    http_uri: str | None = None,
    totals: Totals | None = None,
) -> Ready:
    """Return the message of a worker that serves ``info`` at ``uri``. totals: of its replicas, if it is a
    front of some.
    """
    row = _ROWS.get(info.provider)
    backend = info.provider.removesuffix("ExecutionProvider").lower() if row is None else row.name
    memory = "unknown" if row is None else row.device_memory
    return Ready(
        worker_id=worker_id,
        model_ref=model_ref or info.model_id,
        uri=uri,
        http_uri=http_uri,
        backend=backend,
        device=info.device,
        memory_bytes=psutil.Process().memory_info().rss + (0 if totals is None else totals.memory_bytes),
        device_memory_bytes=_device_memory() if totals is None else totals.device_memory_bytes,
        memory_architecture="system" if info.device == "cpu" else memory,
        worker_type="llorch" if totals is None else "llorch-cluster",
        capabilities=info.capabilities,
        protocol="grpc",
        version=info.version,
        pid=os.getpid(),
    )


def _device_memory() -> int | None:
    return memory_of_process(load_nvml(), os.getpid())


def heartbeat(worker_id: str, load: Load, state: WorkerState) -> Heartbeat:
    """Return the message of this moment."""
    return Heartbeat(worker_id, datetime.now(UTC).isoformat(timespec="milliseconds"), state.value, load)
