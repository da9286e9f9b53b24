"""What a replica is started with: bytes that ``deploy.py`` hands to Ray, and a replica or a front reads.

A front reads them too, so that it checks requests as its replicas would. Equal settings are equal bytes,
which is how a deployment that changes nothing restarts nothing.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from llorch_serve.config import EngineConfig


class StageShare(msgspec.Struct, frozen=True, kw_only=True):
    """What each stage takes of a node, where the stages of a model run on several.

    count: of stages. cores: that its graph runs on alone. gpus, memory_bytes: of the node; less than one GPU
        shares it, and memory that is None is not counted.
    """

    count: int
    cores: int
    gpus: float = 0.0
    memory_bytes: int | None = None


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica of one model runs.

    model: its name in the cluster. artifact: its folder, at the same path on every node, or a repository of
        a hub, as ``org/name@COMMIT``.
    fingerprint: of the artifact's manifest; a replica or a front that finds another one refuses to start.
    version: of the llorch that deployed it, so that another version starts new replicas.
    cores: processor cores of each replica alone; its engine runs as many threads, where it has no stages
        elsewhere.
    otlp_endpoint: where each replica sends spans of its requests; None: nowhere.
    stages: each on a node; None: the replica's process runs the model.
    """

    model: str
    artifact: str
    fingerprint: str
    version: str
    cores: int
    engine: EngineConfig = EngineConfig()
    otlp_endpoint: str | None = None
    stages: StageShare | None = None

    def encode(self) -> bytes:
        """Return the settings as JSON."""
        return msgspec.json.encode(self, enc_hook=_write_path)

    @property
    def digest(self) -> str:
        """What is equal for equal settings alone."""
        return hashlib.sha256(self.encode()).hexdigest()[:16]


def read_settings(raw: bytes) -> ReplicaSettings:
    """Return the settings that :meth:`ReplicaSettings.encode` made bytes of."""
    return msgspec.json.decode(raw, type=ReplicaSettings, dec_hook=_read_path)


def _write_path(value: object) -> str:
    assert isinstance(value, Path)
    return str(value)


def _read_path(kind: type, value: Any) -> Path:
    assert issubclass(kind, Path)
    return Path(value)
