"""A model that is cut into stages, opened: its stages where they run, and a session for each lane through
them.

A lane is a group of slots with an engine of its own. While one lane's call is in a stage, the others' calls
are in the other stages, which is what makes throughput grow with stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.stages import stage_artifacts
from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.config import SessionConfig
from llorch_serve.engine.load import StageTimes
from llorch_serve.errors import StageEndedError
from llorch_serve.providers import (
    CPU,
    activate,
    allowed_cores,
    averaged,
    check_target,
    import_runtime,
    require_arithmetic,
    require_unrecorded,
    usable_cpus,
)
from llorch_serve.runtime.graph_choice import GraphChoice, choose_graphs
from llorch_serve.runtime.memory_plan import widening_notice
from llorch_serve.runtime.opening import LoadReport
from llorch_serve.runtime.operator_check import too_many_rows
from llorch_serve.runtime.row_pairs import require_effect, takes_pairs
from llorch_serve.runtime.session import DecoderSession, SessionGraphs
from llorch_serve.stages.calls import StageCallee, StagePort
from llorch_serve.stages.chain import Chain, MirroredCache
from llorch_serve.stages.checks import check_choice, device_option
from llorch_serve.stages.hosts import HostOpener, LocalHost, StageHost
from llorch_serve.stages.loading import StageRoom, StageSettings, on_device
from llorch_serve.stages.plan import lane_count, pooled_capacity, share_cores, shares, split_capacity
from llorch_serve.stages.process import start_processes
from llorch_serve.stages.relay import Relay
from llorch_serve.stages.stage import StageFacts


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the stages run. relays: of each lane, where calls go from stage to stage; none: by each one's
    port.
    """

    hosts: Sequence[StageHost]
    relays: Sequence[Relay] = ()

    def ports(self, lane: int) -> list[StagePort]:
        """Return what edits of a lane's slots go to."""
        return [host.port(lane) for host in self.hosts]

    def callees(self, lane: int) -> Sequence[StageCallee]:
        """Return what a lane calls, one behind the other."""
        return [self.relays[lane]] if self.relays else self.ports(lane)

    def close(self) -> None:
        """End all stages. Idempotent."""
        for relay in self.relays:
            relay.close()
        for host in self.hosts:
            host.close()


class Pipeline:
    """All stages and lanes. sessions: one for each lane."""

    def __init__(self, places: _Places, sessions: Sequence[DecoderSession]) -> None:
        self.sessions = tuple(sessions)
        self._places = places
        self._ports = list(zip(*(places.ports(lane) for lane in range(len(sessions))), strict=True))

    def times(self) -> tuple[StageTimes, ...]:
        """Return how long each stage has worked, as far as its lanes have been told. Any thread."""
        return tuple(max((port.times() for port in ports), key=lambda t: t.calls) for ports in self._ports)

    def when_ended(self, tell: Callable[[StageEndedError], None]) -> None:
        """Have ``tell`` called, on any thread, if a stage ends before all are closed."""
        for host in self._places.hosts:
            host.when_ended(tell)

    def close(self) -> None:
        """End all stages. Idempotent."""
        self._places.close()


def open_pipeline(
    artifact: Artifact,
    config: SessionConfig,
    report: Callable[[LoadReport], None],
    elsewhere: HostOpener | None = None,
) -> Pipeline:
    """Load the stages of an artifact that is cut, and make a session for each lane.

    elsewhere: starts them on other machines; None: they run on this one, as ``config.stages`` says.
    Raises as :func:`llorch_serve.runtime.opening.open_session` does, and UsageError for a choice of places
    that does not fit the stages.
    """
    manifest = artifact.manifest
    stages = stage_artifacts(artifact)
    graphs = choose_graphs(manifest, config)
    check_choice(config, len(stages))
    runtime = import_runtime(manifest.min_onnxruntime)
    provider = activate(config.provider, runtime)
    require_unrecorded(provider, f"{artifact.folder}, which is in stages")
    check_target(manifest.target, provider.runtime_name)
    require_arithmetic(provider.runtime_name, (manifest.recipe.compute_type,))
    if graphs.int8_cache is not None:
        import_runtime(graphs.int8_cache.min_onnxruntime, instead=f"or use --kv-dtype {manifest.kv.dtype}")
    has_experts = bool(manifest.model.experts)
    on_cpu = provider.runtime_name == CPU
    if config.batch_invariant:
        require_effect(graphs.recipes, on_cpu=on_cpu, has_experts=has_experts)
    lanes = lane_count(config.stages, stages=len(stages), slots=config.slots, apart=elsewhere is not None)
    if elsewhere is None:
        places = _here(artifact, config, stages=len(stages), lanes=lanes)
    else:
        places = _Places(elsewhere(artifact, config, lanes))
    hosts = places.hosts
    try:
        rooms = [host.room() for host in hosts]
        total = pooled_capacity(artifact, config, provider, rooms, lanes=lanes)
        capacities = split_capacity(total, lanes)
        report(LoadReport(config.threads or usable_cpus(), total, _notices(artifact, total, rooms)))
        for host in hosts:
            host.begin(capacities)
        facts = [host.facts() for host in hosts]
        invariant = on_cpu and not has_experts
        invariant &= config.batch_invariant or not any(map(takes_pairs, graphs.recipes))
        sessions = [
            _session(artifact, graphs, places, lane, facts, capacity, batch_invariant=invariant)
            for lane, capacity in enumerate(capacities)
        ]
    except BaseException:
        places.close()
        raise
    return Pipeline(places, sessions)


def _here(artifact: Artifact, config: SessionConfig, *, stages: int, lanes: int) -> _Places:
    """Return where each stage runs on this machine, with its device, its cores and its threads."""
    choice = config.stages
    configs = [config] * stages
    if choice.devices:
        option = device_option(config.provider.name)
        providers = [on_device(config.provider, option, device) for device in choice.devices]
        configs = [replace(config, provider=each) for each in providers]
    threads = config.threads or usable_cpus()
    at_once = choice.processes or lanes > 1
    counts = [max(1, count) for count in shares(threads, stages)] if at_once else [threads] * stages
    settings = [
        StageSettings(artifact, number, own, count, gather=choice.processes)
        for number, (own, count) in enumerate(zip(configs, counts, strict=True))
    ]
    if not choice.processes:
        return _Places([LocalHost(each) for each in settings])
    # With a number of threads of the user's own, the system chooses the cores for them.
    cores = [()] * stages if config.threads else share_cores(allowed_cores(), stages)
    return _Places(*start_processes(settings, cores, lanes))


def _notices(artifact: Artifact, total: KvCapacity, rooms: Sequence[StageRoom]) -> str | None:
    own = total.notice(artifact.manifest.context_length)
    fewest = min((room.max_rows for room in rooms if room.max_rows is not None), default=None)
    few_rows = None if fewest is None else too_many_rows(fewest)
    return "; ".join(filter(None, (own, few_rows, widening_notice(artifact.manifest)))) or None


def _session(
    artifact: Artifact,
    graphs: GraphChoice,
    places: _Places,
    lane: int,
    facts: Sequence[StageFacts],
    capacity: KvCapacity,
    *,
    batch_invariant: bool,
) -> DecoderSession:
    callees = places.callees(lane)
    decode = Chain(callees, prompt=False)
    prompts = decode if graphs.prompts is None else Chain(callees, prompt=True)
    batches = all(each.batched for each in facts)
    return DecoderSession(
        artifact,
        averaged([each.where for each in facts]),
        MirroredCache(places.ports(lane), graphs.kv, capacity, takes_batches=batches),
        SessionGraphs(decode, prompts, None),
        capacity=capacity,
        batch_invariant=batch_invariant,
        max_rows=min((each.max_rows for each in facts if each.max_rows is not None), default=None),
        needs_one_logits_row=any(each.needs_one_logits_row for each in facts),
    )
