"""Reading ``[models.NAME.stages]`` of a cluster's file: what each stage of a model takes of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec

from llorch_serve.artifact.folder import Artifact
from llorch_serve.cluster.settings import StageShare
from llorch_serve.cluster.spec import check_amount
from llorch_serve.cluster.tables import Problems
from llorch_serve.config import read_size
from llorch_serve.errors import UsageError
from llorch_serve.loading.models import load_model

_CORES_BESIDE_GPU: Final = 2
_MOST: Final = 100


class _StagesTable(msgspec.Struct, frozen=True, kw_only=True):
    count: Annotated[int, msgspec.Meta(ge=2, le=_MOST)] | None = None
    cores: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    gpus: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    memory: str | None = None


def read_stages(where: str, table: object, artifact: str, problems: Problems) -> StageShare | None:
    """Return what each stage takes; None, with all noted that is wrong. where: the table, for messages.

    artifact: the model's, which is looked at if it is on this machine.
    """
    before = len(problems.found)
    found = problems.table(table, _StagesTable, where)
    if found is None:
        return None
    if found.cores is None and found.gpus is None:
        problems.note(f"{where} says neither cores nor gpus; give the cores that each stage computes with")
    if found.gpus is not None:
        problems.attempt(check_amount, f"{where}.gpus", found.gpus)
    memory = problems.attempt(read_size, f"{where}.memory", found.memory)
    count = problems.attempt(_count, where, artifact, found.count)
    if count is None or len(problems.found) > before:
        return None
    return StageShare(
        count=count, cores=found.cores or _CORES_BESIDE_GPU, gpus=found.gpus or 0.0, memory_bytes=memory
    )


def _count(where: str, artifact: str, stated: int | None) -> int:
    """Return how many stages an artifact has: its folder's, if that is on this machine, else as stated."""
    folder = Path(artifact)
    if not folder.is_absolute() or not folder.is_dir():
        if stated is None:
            raise UsageError(
                f"{where}.count is missing, and {artifact} is not on this machine; add the number of stages, "
                "as llorch inspect tells it"
            )
        return stated
    model = load_model(folder)
    here = len(model.manifest.stages or ()) if isinstance(model, Artifact) else 0
    if not here:
        raise UsageError(
            f"{where} has no effect on {artifact}, whose model is not cut into stages; leave it out, or "
            "export the model with --stages N"
        )
    if stated not in (None, here):
        raise UsageError(
            f"{where}.count is {stated}, and {artifact} has {here} stages; leave count out, or name the "
            "folder that it belongs to"
        )
    return here
