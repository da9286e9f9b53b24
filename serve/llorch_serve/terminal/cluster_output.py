"""How models of a cluster look: a line while they change, a table or JSON at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from llorch_serve.cluster.deploy import ModelStatus, ReplicaStatus


class ReplicaRow(msgspec.Struct, frozen=True):
    """A replica in JSON. name, state: Ray's. node: the address of its node. stages: of each stage's, where
    stages are on nodes of their own.
    """

    name: str
    state: str
    node: str
    stages: tuple[str, ...] = ()


class ModelRow(msgspec.Struct, frozen=True):
    """A model in JSON. least, most: replicas that it may have; wanted: that Ray wants now; running: that
    answer.
    """

    name: str
    state: str
    message: str
    least: int
    most: int
    wanted: int
    running: int
    artifact: str
    fingerprint: str
    slots: int
    cores: int
    version: str
    replicas: tuple[ReplicaRow, ...]

    @classmethod
    def of(cls, status: ModelStatus) -> ModelRow:
        """Return what JSON tells of a model."""
        settings = status.settings
        return cls(
            status.name,
            status.state,
            status.message,
            status.bounds.least,
            status.bounds.most,
            status.wanted,
            status.running,
            settings.artifact,
            settings.fingerprint,
            settings.engine.session.slots,
            settings.cores,
            settings.version,
            tuple(ReplicaRow(one.name, one.state, one.node, one.stages) for one in status.replicas),
        )


def line_of(status: ModelStatus) -> str:
    """Return how a model is, in one line."""
    why = f": {status.message}" if status.message else ""
    return f"{status.name}: {status.state}, {status.running} of {status.wanted} replicas run{why}"


def table_of(found: Sequence[ModelStatus]) -> str:
    """Return how models are, a line for each and for each replica."""
    if not found:
        return "the cluster has no model\n"
    lines = []
    for status in found:
        settings = status.settings
        bounds = "" if status.bounds.is_fixed else f" (may be {status.bounds})"
        lines += [
            f"{line_of(status)}{bounds}",
            f"  artifact {settings.artifact}, fingerprint {settings.fingerprint[:16]}",
            f"  each replica: {settings.engine.session.slots} slots, {settings.cores} cores; llorch "
            f"{settings.version}",
            *(_replica_line(one) for one in status.replicas),
        ]
    return "\n".join(lines) + "\n"


def _replica_line(replica: ReplicaStatus) -> str:
    nodes = ", ".join(node or "none yet" for node in replica.stages)
    stages = f"; stages on {nodes}" if nodes else ""
    return f"  {replica.name} {replica.state} on {replica.node or 'no node yet'}{stages}"
