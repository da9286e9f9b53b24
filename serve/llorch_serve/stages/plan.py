"""How slots and memory are shared among lanes, and cores among stages.

Input: what all lanes may use together. Output: what each may; nothing is allocated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import psutil

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.stages import stage_artifacts
from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.config import SessionConfig, StageChoice
from llorch_serve.providers import ActiveProvider
from llorch_serve.runtime.graph_choice import choose_graphs
from llorch_serve.runtime.memory_plan import chosen_bytes, fitting_capacity
from llorch_serve.stages.loading import StageRoom


def lane_count(choice: StageChoice, *, stages: int, slots: int, apart: bool = False) -> int:
    """Return how many lanes keep every place at work that works by itself; never more than slots.

    apart: each stage works by itself, wherever ``choice`` would have it.
    Stages in one process on one device take turns, so one lane is all that they can have under way. Each
    further lane would only make the batches smaller.
    """
    places = stages if apart or choice.processes else len(set(choice.devices)) or 1
    return max(1, min(choice.lanes or places, slots))


def split_capacity(total: KvCapacity, lanes: int) -> tuple[KvCapacity, ...]:
    """Return the capacity of each lane; fewer lanes where memory does not suffice for a sequence in each.

    A sequence is in one lane, so every lane's budget must hold one of full length.
    """
    lanes = max(1, min(lanes, total.budget // total.context))
    spare, further = total.budget - lanes * total.context, max(1, total.slots - lanes)
    slots = shares(total.slots, lanes)
    budgets = [total.context + spare * (own - 1) // further for own in slots]
    return tuple(replace(total, slots=own, budget=budget) for own, budget in zip(slots, budgets, strict=True))


def pooled_capacity(
    artifact: Artifact,
    config: SessionConfig,
    provider: ActiveProvider,
    rooms: Sequence[StageRoom],
    *,
    lanes: int,
) -> KvCapacity:
    """Return what all lanes may use together: what the fullest memory has room for.

    Stages whose caches lie in the same memory share it: a host's, or a device's. On another host each stage
    has devices of its own.
    """
    manifest, views = artifact.manifest, stage_artifacts(artifact)
    devices = config.stages.devices or (0,) * len(views)
    pools: dict[tuple[str | None, int | None], list[int]] = {}
    for number, room in enumerate(rooms):
        device = devices[number] if room.host is None else number
        pools.setdefault((room.host, None if room.free_bytes is None else device), []).append(number)
    found = []
    for (_, of_device), numbers in pools.items():
        free = min(_free_bytes(rooms[number], provider) for number in numbers)
        graphs = [choose_graphs(views[number].manifest, config) for number in numbers]
        for number, chosen in zip(numbers, graphs, strict=True):
            free -= chosen_bytes(views[number].manifest, chosen, provider)
        layers = sum(chosen.kv.layers for chosen in graphs)
        own = msgspec.structs.replace(manifest, kv=msgspec.structs.replace(manifest.kv, layers=layers))
        kv = msgspec.structs.replace(graphs[0].kv, layers=layers)
        limit = config.kv_cache_bytes
        if limit is not None:
            limit = limit * layers // manifest.kv.layers
        found.append(
            fitting_capacity(
                own,
                replace(graphs[0], kv=kv),
                replace(config, kv_cache_bytes=limit),
                free_bytes=max(free, 0),
                lanes=lanes,
                whole=of_device is not None,
            )
        )
    return _smallest(found)


def _free_bytes(room: StageRoom, provider: ActiveProvider) -> int:
    """Return what is free in the memory that a stage's cache lies in."""
    if room.free_bytes is not None:
        return room.free_bytes
    here = room.host_bytes is None
    return provider.memory_limit(psutil.virtual_memory().available if here else room.host_bytes or 0)


def shares(whole: int, parts: int) -> list[int]:
    """Return a number as the sum of as many whole numbers, which differ by one at most, the larger first."""
    least, more = divmod(whole, parts)
    return [least + (place < more) for place in range(parts)]


def _smallest(capacities: Sequence[KvCapacity]) -> KvCapacity:
    """Return what every stage has room for; bytes are those of all stages together."""
    context = min(each.context for each in capacities)
    return KvCapacity(
        slots=capacities[0].slots,
        context=context,
        bytes_per_token=sum(each.bytes_per_token for each in capacities),
        budget=min(min(each.budget, each.slots * context) for each in capacities),
        limited_by_memory=any(each.limited_by_memory for each in capacities),
    )


def share_cores(cores: Sequence[int], stages: int) -> list[tuple[int, ...]]:
    """Return the cores of each stage's process: neighbours, and all of them where there are too few."""
    if len(cores) < stages:
        return [tuple(cores)] * stages
    found, first = [], 0
    for count in shares(len(cores), stages):
        found.append(tuple(cores[first : first + count]))
        first += count
    return found
