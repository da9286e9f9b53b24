"""Models made applications of Ray Serve: deployed, looked at and deleted.

Input: what :mod:`llorch_serve.cluster.spec` says should run. Output: applications that Ray keeps so, one for
each model, and how they are. The process has joined the cluster, see
:mod:`llorch_serve.cluster.connection`.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from llorch_serve.cluster.ray_internals import (
    LARGE_REQUESTS,
    applications,
    begin_delete,
    nodes_of_bundles,
    versioned,
)
from llorch_serve.cluster.settings import ReplicaSettings, StageShare, read_settings
from llorch_serve.cluster.spec import ModelSpec, ReplicaRange
from llorch_serve.errors import UsageError, WorkerError

if TYPE_CHECKING:
    from ray.serve.api import RunTarget
    from ray.serve.schema import ApplicationDetails

DEPLOYMENT: Final = "replica"
"""The deployment of every application, see :func:`application_of`."""
_PREFIX: Final = "llorch-"
_ROUTING: Final[dict[str, Any]] = {"request_router_class": "llorch_serve.cluster.router.PrefixRouter"}
_POLL_S: Final = 0.5
_LEAST_LOOK_BACK_S: Final = 10.5  # more than its interval between two looks, or Ray warns
_HEALTH_S: Final = 1.0
"""Between two questions after a replica's health. Three bad answers end it, as it has ended by then where a
stage of it has.
"""

_RUNNING: Final = "RUNNING"
_FAILED: Final = "DEPLOY_FAILED"
_ERROR: Final = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?[A-Za-z_]\w*(?:Error|Exception|Interrupt): (.+)$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica. name, state: Ray's, as STARTING, RUNNING or STOPPING. node: its node's address.

    stages: the address of each stage's node, where stages are on nodes of their own.
    """

    name: str
    node: str
    state: str
    stages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model of the cluster.

    settings: what its replicas are started with. wanted: how many of them Ray wants now, of ``bounds``.
    state: DEPLOYING, RUNNING, UNHEALTHY, DEPLOY_FAILED or DELETING, Ray's words. message: why, in one line.
    """

    settings: ReplicaSettings
    state: str
    message: str
    bounds: ReplicaRange
    wanted: int
    replicas: tuple[ReplicaStatus, ...]

    @property
    def name(self) -> str:
        """The model's name."""
        return self.settings.model

    @property
    def running(self) -> int:
        """How many replicas answer."""
        return sum(replica.state == _RUNNING for replica in self.replicas)

    @property
    def gist(self) -> tuple[str, str, int, int]:
        """What changes of it as time goes by, but for the names of its replicas."""
        return self.state, self.message, self.running, self.wanted


def application_of(model: str) -> str:
    """Return the name of the application that a model is."""
    return f"{_PREFIX}{model}"


def deploy(models: Sequence[ModelSpec], actor: type) -> None:
    """Have Ray run the models so, and return before it does: replicas are replaced one by one where their
    settings changed, and left alone where they did not. Other models of the cluster go on.

    actor: the class of a replica, which is made of the bytes of its settings.
    """
    from ray import serve

    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    targets = [_application(model, actor) for model in models]
    serve.run_many(targets, wait_for_applications_running=False)


def await_running(
    names: Collection[str],
    timeout_s: float,
    tell: Callable[[ModelStatus], None],
    check: Callable[[], None] = lambda: None,
) -> list[ModelStatus]:
    """Wait until every one of the models runs as it was deployed; return how they are.

    tell: told of each that has changed, in its state, message or numbers of replicas. check: called again and
        again; what it raises ends the wait.
    Raises WorkerError for a model that Ray gave up on, or that took too long: Ray goes on trying that one.
    """
    until = time.monotonic() + timeout_s
    told: dict[str, ModelStatus] = {}
    while True:
        check()
        found = [status for status in statuses() if status.name in names]
        for status in found:
            before = told.get(status.name)
            told[status.name] = status
            if before is None or before.gist != status.gist:
                tell(status)
        if failed := [status for status in found if status.state == _FAILED]:
            raise WorkerError("; ".join(f"{one.name} does not run: {one.message}" for one in failed))
        missing = [name for name in names if name not in told or told[name].state != _RUNNING]
        if not missing:
            return found
        if time.monotonic() > until:
            why = "; ".join(
                f"{name}: {told[name].message if name in told else 'not known'}" for name in missing
            )
            raise WorkerError(
                f"not all replicas run after {timeout_s:g} s, and Ray goes on trying ({why}); see llorch "
                "cluster status"
            )
        time.sleep(_POLL_S)


def statuses() -> list[ModelStatus]:
    """Return how every model of the cluster is, by name."""
    ours = [one for name, one in applications().items() if name.startswith(_PREFIX)]
    placed = functools.cache(nodes_of_bundles)  # asked for where a model has stages alone
    found = [_status(one, placed) for one in ours]
    return sorted((status for status in found if status is not None), key=lambda status: status.name)


def find_settings(model: str | None) -> ReplicaSettings:
    """Return what the replicas of a model are started with. model: its name; None: the only one there is.

    Raises UsageError where there is none of that name, or several to choose from.
    """
    there = {status.name: status.settings for status in statuses()}
    if model is None and len(there) == 1:
        return next(iter(there.values()))
    if model is not None and model in there:
        return there[model]
    have = f"the cluster has {', '.join(there)}" if there else "the cluster has no model; deploy one first"
    if model is None:
        raise UsageError(f"no --model is given, and {have}")
    raise UsageError(f"--model is {model[:100]!r}, and {have}")


def delete(names: Sequence[str]) -> None:
    """Have Ray delete models, and return before it has: their replicas drain.

    Raises UsageError for a name that the cluster does not have, before any is deleted.
    """
    there = {status.name for status in statuses()}
    if unknown := [name for name in names if name not in there]:
        have = f"it has {', '.join(sorted(there))}" if there else "it has none"
        raise UsageError(f"the cluster has no model {', '.join(name[:100] for name in unknown)}; {have}")
    for name in names:
        begin_delete(application_of(name))


def await_gone(names: Sequence[str]) -> None:
    """Wait until no process of the deleted models runs."""
    while any(_runs(name) for name in names):
        time.sleep(_POLL_S)


def _application(model: ModelSpec, actor: type) -> RunTarget:
    """Return a model as Serve runs it: a deployment whose version is that of its settings."""
    from ray import serve
    from ray.serve.api import RunTarget
    from ray.serve.config import RequestRouterConfig

    raw = model.settings.encode()
    slots = model.settings.engine.session.slots
    options: dict[str, Any] = {
        "num_cpus": model.settings.cores,
        "num_gpus": model.gpus,
        "runtime_env": {"env_vars": LARGE_REQUESTS},
    }
    if model.memory_bytes is not None:
        options["memory"] = model.memory_bytes
    if model.resources:
        options["resources"] = dict(model.resources)
    scaled: dict[str, Any] = {"num_replicas": model.replicas.least}
    if not model.replicas.is_fixed:
        scaled = {"autoscaling_config": _autoscaling(model, slots)}
    deployment = serve.deployment(
        name=DEPLOYMENT,
        ray_actor_options=options,
        user_config=msgspec.json.decode(raw),
        max_ongoing_requests=2 * slots,  # so that the engine's own fairness still chooses
        max_queued_requests=model.max_queued,
        max_surge_percent=100,  # a new replica runs before an old one ends
        graceful_shutdown_timeout_s=model.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config={"enable_access_log": False},
        request_router_config=RequestRouterConfig(**_ROUTING),
        **scaled,
        **_spread(options, model.settings.stages),
    )(actor)
    bound = versioned(deployment, model.settings.digest).bind(raw)
    return RunTarget(bound, application_of(model.name), route_prefix=None)


def _spread(options: Mapping[str, Any], stages: StageShare | None) -> dict[str, Any]:
    """Return what has Ray keep room on nodes for the stages of each replica, which is beside its first stage.

    options: what the replica's own process takes.
    """
    if stages is None:
        return {}
    own = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], "memory": options.get("memory", 0)}
    each = {"CPU": stages.cores, "GPU": stages.gpus, "memory": stages.memory_bytes or 0}
    first = {name: own[name] + each[name] for name in own} | options.get("resources", {})
    bundles = [first] + [each] * (stages.count - 1)
    return {
        "placement_group_bundles": [{name: n for name, n in one.items() if n} for one in bundles],
        "placement_group_strategy": "SPREAD",
        "health_check_period_s": _HEALTH_S,
    }


def _autoscaling(model: ModelSpec, slots: int) -> dict[str, Any]:
    scaling = model.scaling
    return {
        "min_replicas": model.replicas.least,
        "max_replicas": model.replicas.most,
        "target_ongoing_requests": scaling.target_requests or slots,
        "upscale_delay_s": scaling.up_delay_s,
        "downscale_delay_s": scaling.down_delay_s,
        # Requests of long ago do not count; Ray looks at 10 s at least.
        "look_back_period_s": max(_LEAST_LOOK_BACK_S, min(30.0, scaling.up_delay_s)),
    }


def _runs(model: str) -> bool:
    """Tell whether anything of a deleted model runs. What never found a node Ray keeps for as long as a
    drain may take.
    """
    application = applications().get(application_of(model))
    if application is None:
        return False
    replicas = [replica for one in application.deployments.values() for replica in one.replicas]
    return application.status.value != "DELETING" or any(replica.pid is not None for replica in replicas)


def _status(
    application: ApplicationDetails, placed: Callable[[], Mapping[str, Sequence[str]]]
) -> ModelStatus | None:
    """Return how a model is; None for an application that is not known whole, or is no model of llorch's.

    placed: returns the nodes of each replica's stages, by the name of its actor.
    """
    deployment = application.deployments.get(DEPLOYMENT)
    if deployment is None:
        return None
    config = deployment.deployment_config
    try:
        settings = read_settings(msgspec.json.encode(config.user_config))
    except (TypeError, msgspec.ValidationError):
        return None
    nodes = {} if settings.stages is None else placed()
    bounds = ReplicaRange(deployment.target_num_replicas, deployment.target_num_replicas)
    if isinstance(scaling := config.autoscaling_config, dict):
        bounds = ReplicaRange(scaling["min_replicas"], scaling["max_replicas"])
    state = application.status.value
    return ModelStatus(
        settings,
        state,
        "" if state == _RUNNING else _reason(deployment.message or application.message),
        bounds,
        deployment.target_num_replicas,
        tuple(
            ReplicaStatus(
                one.replica_id,
                one.node_ip or "",
                one.state.value,
                tuple(nodes.get(one.actor_name or "", ())),
            )
            for one in deployment.replicas
        ),
    )


def _reason(message: str) -> str:
    """Return what a person can act on of Ray's message, in one line: the last error in it, if any."""
    quoted = _ERROR.findall(message)
    return " ".join((quoted[-1] if quoted else message).split())[:1000]
