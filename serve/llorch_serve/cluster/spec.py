"""What should run in a cluster: each model's replicas, and what each of them takes of a node.

:mod:`llorch_serve.cluster.spec_file` reads it from a TOML file; ``llorch serve --replicas`` makes one of its
flags; :mod:`llorch_serve.cluster.deploy` makes it so.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from llorch_serve.artifact.folder import is_artifact
from llorch_serve.cluster.settings import ReplicaSettings
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.foreign.detect import foreign_kind
from llorch_serve.loading.models import load_model

MOST_REPLICAS: Final = 10_000
MOST_SLOTS: Final = 4096
_PARTS: Final = 10_000  # Ray counts in ten thousandths
_OWN_KEYS: Final = {"CPU": "cores", "GPU": "gpus", "memory": "memory"}
_KEPT: Final = frozenset({"object_store_memory", "bundle"})
_REPLICAS: Final = re.compile(r"(\d{1,6})(?::(\d{1,6}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ReplicaRange:
    """How many replicas run: ``least`` to ``most``, between which Ray chooses by the requests there are."""

    least: int = 1
    most: int = 1

    def __str__(self) -> str:
        return str(self.least) if self.is_fixed else f"{self.least}:{self.most}"

    @property
    def is_fixed(self) -> bool:
        """Whether there is nothing to choose."""
        return self.least == self.most


@dataclass(frozen=True, slots=True)
class Scaling:
    """When the number of replicas changes.

    target_requests: requests in flight on each replica that Ray aims at; None: as many as it has slots.
    up_delay_s, down_delay_s: for how long more, or fewer, replicas must have been right.
    """

    target_requests: float | None = None
    up_delay_s: float = 30.0
    down_delay_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of a cluster.

    gpus, memory_bytes: of a node, for each replica; less than one GPU shares it, and memory that is None is
        not counted. resources: other resources of Ray for each replica, by name.
    drain_s: how long answers may go on in a replica that is to end. max_queued: requests that each front lets
        wait for a replica.
    """

    settings: ReplicaSettings
    replicas: ReplicaRange = ReplicaRange()
    scaling: Scaling = Scaling()
    gpus: float = 0.0
    memory_bytes: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    drain_s: float = 300.0
    max_queued: int = 1024

    @property
    def name(self) -> str:
        """The model's name in the cluster."""
        return self.settings.model

    @property
    def shares_memory(self) -> bool:
        """Whether several replicas may each take what is free of one node."""
        unbounded = self.settings.engine.session.kv_cache_bytes is None
        stages = self.settings.stages
        on_gpus = self.gpus if stages is None else stages.gpus
        return unbounded and not on_gpus and self.replicas.most > 1


def read_replicas(source: str, value: int | str) -> ReplicaRange:
    """Return what ``2`` or ``1:4`` stands for. source: the flag or key, for messages. Raises UsageError."""
    match = _REPLICAS.fullmatch(str(value))
    if match is not None:
        least = int(match[1])
        most = least if match[2] is None else int(match[2])
        if 1 <= least <= most <= MOST_REPLICAS:
            return ReplicaRange(least, most)
    raise UsageError(
        f"{source} is {str(value)[:40]!r}; expected a number like 2, or least:most like 1:4, from 1 to "
        f"{MOST_REPLICAS}"
    )


def check_amount(source: str, value: float) -> None:
    """Raise UsageError for an amount that Ray cannot count. source: the key, for messages."""
    parts = value * _PARTS
    if not value.is_integer() and (value > 1 or abs(parts - round(parts)) > 1e-6):
        raise UsageError(
            f"{source} is {value:g}; expected a whole number, or a part of one in steps of {1 / _PARTS:g}"
        )


def check_resources(source: str, resources: Mapping[str, float]) -> None:
    """Raise UsageError for resources that Ray does not take by these names. source: as of check_amount."""
    for name, value in resources.items():
        if not name:
            raise UsageError(f"{source} has an empty name; give the name that a node was started with")
        if name in _OWN_KEYS:
            raise UsageError(f"{source} names {name}, which {_OWN_KEYS[name]} says; leave it out here")
        if name in _KEPT:
            raise UsageError(f"{source} names {name}, which Ray keeps for itself; leave it out")
        check_amount(f"{source}.{name[:64]}", value)


def find_fingerprint(artifact: str, stated: str | None) -> str:
    """Return the fingerprint of an artifact: of its folder if that is on this machine, else as it was stated.

    Raises UsageError where it is not known or not as stated, ArtifactError for a folder that is damaged.
    """
    folder = Path(artifact)
    try:
        folder.stat()
    except FileNotFoundError:
        pass  # it may be on the nodes alone
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{artifact[:80]!r} cannot be looked at ({why}); name another folder") from error
    if is_artifact(folder) or foreign_kind(folder) is not None:
        found = load_model(folder).manifest.fingerprint
        if stated not in (None, found):
            raise UsageError(
                f"{artifact} has the fingerprint {found}, and {stated} is stated; leave it out, or name the "
                "folder that it belongs to"
            )
        return found
    if folder.is_dir():
        raise ArtifactError(f"{artifact} holds no artifact; expected a folder that llorch export has written")
    if stated is None:
        raise UsageError(
            f"{artifact} is not on this machine, so its fingerprint is not known; add fingerprint, as llorch "
            "inspect --json tells it"
        )
    return stated


def llorch_version() -> str:
    """Return the version of this llorch."""
    return importlib.metadata.version("llorch")
