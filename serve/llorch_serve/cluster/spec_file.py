"""Reading the TOML file of a cluster: a table ``[models.NAME]`` for each model.

The file is a person's; every key and value of it is checked before any node is asked for anything, and all
that is wrong is told at once.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from llorch_serve.artifact.manifest import KvDtype
from llorch_serve.calls.trace_endpoint import check_endpoint
from llorch_serve.cluster.settings import ReplicaSettings
from llorch_serve.cluster.spec import (
    MOST_SLOTS,
    ModelSpec,
    Scaling,
    check_amount,
    check_resources,
    find_fingerprint,
    llorch_version,
    read_replicas,
)
from llorch_serve.cluster.stage_table import read_stages
from llorch_serve.cluster.tables import Problems
from llorch_serve.config import AUTO, CacheSharing, EngineConfig, SessionConfig, read_names, read_size
from llorch_serve.errors import LlorchError, UsageError
from llorch_serve.hub.reference import parse_reference
from llorch_serve.providers import ProviderChoice
from llorch_serve.providers.options import read_options
from llorch_serve.providers.table import Provider, find_provider

_CORES_BESIDE_GPU: Final = 2  # one launches kernels, one reads and writes requests
_CORES_BESIDE_STAGES: Final = 1  # which sample, and read and write requests
_MAX_BYTES: Final = 2**20
_MAX_MODELS: Final = 1000
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SPLITTING: Final = (
    "tensor_parallel",
    "tensor_parallel_size",
    "pipeline_parallel",
    "pipeline_parallel_size",
    "tp",
    "pp",
)
_WHOLE_MODEL: Final = (
    "each replica holds a whole model, on one device (docs/cluster-arithmetic.md says why); give replicas "
    "instead, or export the model with --stages N and give stages"
)
_SECONDS: Final = msgspec.Meta(ge=0, le=86_400)

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class _ScalingTable(msgspec.Struct, frozen=True):
    """``[models.NAME.scaling]``."""

    target_requests: Annotated[float, msgspec.Meta(gt=0, le=100_000)] | None = None
    up_delay_s: Annotated[float, _SECONDS] = 30.0
    down_delay_s: Annotated[float, _SECONDS] = 600.0


class _ModelTable(msgspec.Struct, frozen=True, kw_only=True):
    """``[models.NAME]``; keys that a flag of ``llorch serve`` has too mean the same."""

    artifact: Text
    fingerprint: str | None = None
    replicas: int | str = 1
    scaling: Any = None
    slots: Annotated[int, msgspec.Meta(ge=1, le=MOST_SLOTS)] = 8
    cores: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    gpus: Annotated[float, msgspec.Meta(gt=0, le=1024)] | None = None
    memory: str | None = None
    resources: dict[str, Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]] = {}
    stages: Any = None
    drain_s: Annotated[float, _SECONDS] = 300.0
    max_queued_requests: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1024
    max_context: Annotated[int, msgspec.Meta(ge=1)] | None = None
    kv_cache_memory: str | None = None
    kv_dtype: KvDtype | None = None
    single_graph: bool = False
    batch_invariant: bool = False
    huge_pages: bool | None = None
    share_weights: bool = False
    provider: Text | None = None
    provider_options: tuple[Text, ...] = ()
    ep_library: Text | None = None
    allow_cpu_nodes: bool = False
    prefix_cache: bool = True
    strict_reuse: bool = False
    lookup: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    draft: Text | None = None
    cache_sharing: CacheSharing = CacheSharing.CALLER
    tool_format: Text = AUTO
    reasoning_format: Text = AUTO
    rank_format: Text = AUTO
    served_names: tuple[str, ...] = ()
    otlp_endpoint: Text | None = None


def load_spec(path: Path) -> tuple[ModelSpec, ...]:
    """Read a cluster's file. Raises UsageError, which names all that is wrong with it."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); expected a TOML file") from error
    if len(content) > _MAX_BYTES:
        raise UsageError(f"{path} is larger than {_MAX_BYTES} bytes, so it is not a cluster's file")
    return parse_spec(content, origin=str(path))


def parse_spec(content: bytes, *, origin: str) -> tuple[ModelSpec, ...]:
    """Parse the bytes of a cluster's file. origin: its name for messages. Raises UsageError."""
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError
        raise UsageError(f"{origin} is not TOML: {error}") from error
    problems = Problems(dict.fromkeys(_SPLITTING, f"would split a model; {_WHOLE_MODEL}"))
    problems.refuse_unknown(document, ("models",), "the file")
    models = document.get("models", {})
    if not isinstance(models, dict) or not 1 <= len(models) <= _MAX_MODELS:
        found_many = f"{len(models)} models" if isinstance(models, dict) and models else "no models"
        problems.note(f"it names {found_many}; expected a table [models.NAME] for each, 1 to {_MAX_MODELS}")
        models = {}
    found = [_read_model(name, table, problems) for name, table in models.items()]
    if problems.found:
        raise UsageError(f"{origin}: {'; '.join(problems.found)}")
    return tuple(model for model in found if model is not None)


def _read_model(name: str, table: object, problems: Problems) -> ModelSpec | None:
    where = f"models.{name[:64]}"
    if not _NAME.fullmatch(name):
        problems.note(
            f"{name[:64]!r} is no name of a model; expected letters, digits, '.', '_' and '-', at most 63"
        )
    before = len(problems.found)
    found = problems.table(table, _ModelTable, where)
    given = table.get("scaling", {}) if isinstance(table, dict) else {}
    scaling = problems.table(given, _ScalingTable, f"{where}.scaling")
    if found is None or scaling is None:
        return None
    replicas = problems.attempt(read_replicas, f"{where}.replicas", found.replicas)
    if replicas is not None and replicas.is_fixed and given:
        problems.note(
            f"{where}.scaling has no effect where replicas is {replicas}; leave it out, or give least:most"
        )
    _check_artifact(found, where, problems)
    _check_share(found, where, problems)
    _check_together(found, where, problems)
    problems.attempt(check_resources, f"{where}.resources", found.resources)
    if found.otlp_endpoint is not None:
        problems.attempt(check_endpoint, f"{where}.otlp_endpoint", found.otlp_endpoint)
    memory = problems.attempt(read_size, f"{where}.memory", found.memory)
    stages = None
    if found.stages is not None:
        stages = read_stages(f"{where}.stages", found.stages, found.artifact, problems)
    cores = found.cores or (_CORES_BESIDE_GPU if found.stages is None else _CORES_BESIDE_STAGES)
    engine = _read_engine(found, cores, where, problems)
    if len(problems.found) > before:
        return None
    fingerprint = problems.attempt(find_fingerprint, found.artifact, found.fingerprint)
    if replicas is None or fingerprint is None:
        return None
    settings = ReplicaSettings(
        model=name,
        artifact=found.artifact,
        fingerprint=fingerprint,
        version=llorch_version(),
        cores=cores,
        engine=engine,
        otlp_endpoint=found.otlp_endpoint,
        stages=stages,
    )
    return ModelSpec(
        settings,
        replicas,
        Scaling(scaling.target_requests, scaling.up_delay_s, scaling.down_delay_s),
        gpus=found.gpus or 0.0,
        memory_bytes=memory,
        resources=found.resources,
        drain_s=found.drain_s,
        max_queued=found.max_queued_requests,
    )


def _read_engine(found: _ModelTable, cores: int, where: str, problems: Problems) -> EngineConfig:
    library = None if found.ep_library is None else Path(found.ep_library)
    session = SessionConfig(
        threads=cores,
        slots=found.slots,
        max_context=found.max_context,
        kv_cache_bytes=problems.attempt(read_size, f"{where}.kv_cache_memory", found.kv_cache_memory),
        kv_dtype=found.kv_dtype,
        single_graph=found.single_graph,
        batch_invariant=found.batch_invariant,
        huge_pages=found.huge_pages,
        share_weights=found.share_weights,
        provider=ProviderChoice(found.provider, found.provider_options, library, found.allow_cpu_nodes),
    )
    return EngineConfig(
        session=session,
        prefix_cache=found.prefix_cache,
        cache_sharing=found.cache_sharing,
        strict_reuse=found.strict_reuse,
        lookup=found.lookup,
        draft=None if found.draft is None else Path(found.draft),
        tool_format=found.tool_format,
        reasoning_format=found.reasoning_format,
        rank_format=found.rank_format,
        served_names=problems.attempt(read_names, f"{where}.served_names", found.served_names) or (),
    )


def _check_artifact(found: _ModelTable, where: str, problems: Problems) -> None:
    """Note an artifact that nodes could not find, or could not tell from another one."""
    if found.fingerprint is not None and not _FINGERPRINT.fullmatch(found.fingerprint):
        problems.note(
            f"{where}.fingerprint is {found.fingerprint[:80]!r}; expected 64 hexadecimal digits, as llorch "
            "inspect --json tells it"
        )
    if Path(found.artifact).is_absolute():
        return
    reference = parse_reference(found.artifact)
    if reference is None or reference.choice is not None:
        problems.note(
            f"{where}.artifact is {found.artifact[:200]!r}; expected the absolute path of a folder, which is "
            "the same on every node, or a hub repository org/name@REVISION"
        )
    elif found.fingerprint is None:
        problems.note(
            f"{where}.artifact is {found.artifact}, a hub repository, so fingerprint must be given too, as "
            "llorch inspect --json tells it; a folder is named by its absolute path"
        )


def _check_share(found: _ModelTable, where: str, problems: Problems) -> None:
    """Note what replicas take of a node that does not fit what runs their graph."""
    row = problems.attempt(_find_provider, where, found) if found.ep_library is None else None
    on_cpu = row is not None and row.name == "cpu"
    staged = isinstance(found.stages, dict)
    on_gpus = found.stages.get("gpus") if staged else found.gpus
    if staged and found.gpus is not None:
        problems.note(
            f"{where}.gpus has no effect on a model whose stages are on nodes of their own; give stages.gpus"
        )
    if staged and on_gpus is not None and on_cpu:
        problems.note(
            f"{where}.stages.gpus has no effect on the CPU; leave it out, or give a provider, like cuda"
        )
    if found.cores is None and found.gpus is None and found.stages is None:
        problems.note(f"{where} says neither cores nor gpus; give the cores that each replica computes with")
    if found.gpus is not None and on_cpu:
        problems.note(f"{where}.gpus has no effect on the CPU; leave it out, or give a provider, like cuda")
    if found.allow_cpu_nodes and on_cpu:
        problems.note(f"{where}.allow_cpu_nodes has no effect on the CPU, where all nodes are; leave it out")
    if found.gpus is not None and found.gpus > 1:
        problems.note(f"{where}.gpus is {found.gpus:g}; {_WHOLE_MODEL}")
    elif found.gpus is not None:
        problems.attempt(check_amount, f"{where}.gpus", found.gpus)
    if row is not None and row.device_type == "cuda" and on_gpus is None:
        asks, key = ("stage", "stages.gpus") if staged else ("replica", "gpus")
        problems.note(
            f"{where}.provider is {found.provider}, and Ray hides GPUs from a {asks} that asks for none; "
            f"give {key} = 1"
        )


def _check_together(found: _ModelTable, where: str, problems: Problems) -> None:
    """Note settings of an engine that do not go together."""
    if found.batch_invariant and (found.lookup or found.draft is not None):
        problems.note(
            f"{where}.batch_invariant does not go with {'lookup' if found.lookup else 'draft'}, whose checks "
            "depend on how many sequences are running; leave one of them out"
        )
    if found.draft is not None:
        _check_draft(found, found.draft, where, problems)
    if found.share_weights and found.stages is not None:
        problems.note(
            f"{where}.share_weights has no effect on stages, each of which is loaded once; leave it out"
        )
    if found.strict_reuse and not found.prefix_cache:
        problems.note(f"{where}.strict_reuse has no effect without prefix_cache; leave one of them out")


def _check_draft(found: _ModelTable, draft: str, where: str, problems: Problems) -> None:
    """Note a draft that nodes could not find, or that something else leaves no room for."""
    if not Path(draft).is_absolute():
        problems.note(
            f"{where}.draft is {draft[:200]!r}; expected the absolute path of a folder, which is the same on "
            "every node"
        )
    if found.lookup:
        problems.note(
            f"{where}.draft does not go with lookup, as guesses come from one of them; leave one out"
        )
    if found.stages is not None:
        problems.note(f"{where}.draft has no effect on a model that is cut into stages; leave it out")


def _find_provider(where: str, found: _ModelTable) -> Provider:
    try:
        row = find_provider(found.provider or "cpu")
        read_options(row.name, row.options, found.provider_options)
    except LlorchError as error:
        raise UsageError(f"{where}: {error}") from error
    return row
