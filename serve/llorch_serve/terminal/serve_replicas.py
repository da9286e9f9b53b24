"""What ``llorch serve`` serves with ``--cluster`` or ``--replicas``: a model that replicas run elsewhere.

Input: the cluster's head, or what should run here. Output: a generator over the replicas. The cluster is
joined, or started, before the port is bound; the replicas are waited for while it answers already.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from llorch_serve.cluster.settings import ReplicaSettings
from llorch_serve.config import EngineConfig, StageChoice
from llorch_serve.errors import LlorchError, UsageError
from llorch_serve.loading.progress import LoadProgress
from llorch_serve.providers import usable_cpus
from llorch_serve.providers.table import find_provider
from llorch_serve.terminal.console import note, say
from llorch_serve.terminal.requirements import required
from llorch_serve.terminal.target import ModelFlags, export_source

if TYPE_CHECKING:
    from llorch_serve.calls.interfaces import ClosableGenerator, Companion
    from llorch_serve.cluster.deploy import ModelStatus
    from llorch_serve.cluster.follow import ModelFollower
    from llorch_serve.cluster.head import HeadAddress
    from llorch_serve.cluster.reopening import ReopenableGenerator
    from llorch_serve.cluster.routed_generator import RoutedGenerator
    from llorch_serve.cluster.spec import ModelSpec
    from llorch_serve.requests import ModelInfo
    from llorch_serve.terminal.replica_flags import ReplicaFlags
    from llorch_serve.terminal.serving_flags import QueueFlags

LOCAL_NAME: Final = "model"
"""The model's name in a cluster of this process's own."""
START_S: Final = 1800.0  # that replicas on this machine may take to load


@dataclass(slots=True)
class Elsewhere:
    """A model that replicas run.

    name: the cluster's, for messages. cluster: joins it, or starts one.
    settings: of the model there, once this process is in it. worker: the generator, once one is open.
    """

    name: str
    cluster: Callable[[], AbstractContextManager[None]]
    settings: Callable[[LoadProgress], ReplicaSettings]
    resume_streams: bool
    progress: LoadProgress = field(default_factory=LoadProgress)
    worker: ReopenableGenerator | None = None
    _served: ReplicaSettings | None = None
    _following: ModelFollower | None = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def prepare(self) -> None:
        """Be in the cluster: before anything listens, as Ray forks where it starts one."""
        with required("ray"):
            self._stack.enter_context(self.cluster())

    def load(self) -> ClosableGenerator:
        """Open the model's replicas, once they run."""
        from llorch_serve.cluster.connection import told_failures

        with told_failures(self.name):
            return self._open(self.settings(self.progress))

    def _open(self, found: ReplicaSettings) -> ClosableGenerator:
        from llorch_serve.cluster.place import find_folder
        from llorch_serve.cluster.reopening import ReopenableGenerator

        find_folder(found)
        self._served = found
        self.progress.check()
        self.worker = ReopenableGenerator(self._routed(found, self.progress.check))
        return self.worker

    def _routed(self, found: ReplicaSettings, check: Callable[[], None]) -> RoutedGenerator:
        from llorch_serve.cluster.front_model import open_front_model
        from llorch_serve.cluster.handles import find_replicas
        from llorch_serve.cluster.place import find_folder
        from llorch_serve.cluster.routed_generator import open_routed

        opened = open_routed(
            find_replicas(found.model, found.fingerprint),
            lambda told: open_front_model(find_folder(found), told),
            check=check,
            resume_streams=self.resume_streams,
        )
        if self.resume_streams and not opened.model_info().batch_invariant:
            note(
                "a stream whose replica ends may go on as another answer than it would have been, as this "
                "model's do not stay the same from batch to batch; deploy with batch_invariant, or leave "
                "--resume-streams out"
            )
        return opened

    def _open_beside(self, found: ReplicaSettings, check: Callable[[], None]) -> RoutedGenerator:
        """Open what was deployed anew, once a replica of it runs."""
        from llorch_serve.cluster.place import find_folder

        with contextlib.suppress(LlorchError, OSError):  # fetched while the replicas load; tried again then
            find_folder(found)
        return self._routed(found, check)

    def companions(self) -> tuple[Companion, ...]:
        """Return what watches the cluster while its model is served."""
        from llorch_serve.cluster.connection import head_of_this
        from llorch_serve.cluster.watch import ClusterWatch

        return (
            ClusterWatch(
                head_of_this,
                lambda: self._follower().look(),
                is_urgent=lambda: self._follower().is_urgent(),
            ),
        )

    def _follower(self) -> ModelFollower:
        """Return what has the model's replacement served, once one is open."""
        from llorch_serve.cluster.follow import ModelFollower

        if self._following is None:
            assert self.worker is not None
            self._following = ModelFollower(self.worker, self._deployed, self._open_beside, say)
        return self._following

    def _deployed(self) -> ReplicaSettings | None:
        """Return what is deployed as the model now."""
        from llorch_serve.cluster.deploy import find_settings

        assert self._served is not None
        try:
            return find_settings(self._served.model)
        except UsageError:  # there is none of that name
            return None

    def info(self) -> ModelInfo:
        """Describe what is served."""
        assert self.worker is not None
        return self.worker.model_info()

    def describe(self) -> str:
        """Say what is served, in a phrase."""
        info = self.info()
        return (
            f"{info.model_id} ({info.precision}) by replicas on {info.provider}, each of {info.slots} slots "
            f"of {info.context_length} tokens"
        )

    def close(self) -> None:
        """Leave the cluster, and end it if it is this process's own."""
        self._stack.close()


def there(head: HeadAddress, model: ModelFlags, *, resume_streams: bool) -> Elsewhere:
    """Return the load of a model that a cluster runs.

    Raises UsageError for flags that name a folder, and ProviderError without Ray.
    """
    from llorch_serve.cluster.connection import check_version, joined

    if model.model_dir is not None:
        raise UsageError(
            f"DIR is {model.model_dir}, and --cluster serves what was deployed there; leave DIR out, or "
            "unset LLORCH_CLUSTER"
        )
    if model.verify_signature is not None:
        raise UsageError("--verify-signature has no effect with --cluster, whose replicas load the model")
    if os.environ.get("MODEL_PATH"):
        note("MODEL_PATH has no effect with --cluster, where the deployed file names the artifact")
    with required("ray"):
        check_version()
    return Elsewhere(
        f"the cluster at {head}", lambda: joined(head, note), settings_there(model.model), resume_streams
    )


def beside(
    target: str,
    folder: Path | None,
    config: EngineConfig,
    elsewhere: ReplicaFlags,
    queue: QueueFlags,
    *,
    signed: Path | None,
    tokenizer: Path | None,
    otlp_endpoint: str | None,
) -> Elsewhere:
    """Return the load of a model into replicas on this machine, by a Ray of their own.

    config: without what the flags of the queue say. otlp_endpoint: where the replicas send spans, too.
    Raises UsageError for flags that replicas do not obey, and ProviderError without Ray.
    """
    from llorch_serve.cluster.connection import check_version, local_cluster

    if signed is not None or tokenizer is not None:
        what = "TOKENIZER_PATH" if signed is None else "--verify-signature"
        raise UsageError(
            f"{what} has no effect with --replicas, which load the folder as it is; leave it out"
        )
    _check_stages(config)
    if queue.max_queued_tokens is not None:
        raise UsageError(
            "--max-queued-tokens has no effect with --replicas, which requests wait for; leave it out"
        )
    replicas = elsewhere.range()
    with required("ray"):
        check_version()
    cores = config.session.threads or max(1, usable_cpus() // replicas.most)
    on_gpus = find_provider(config.session.provider.name or "cpu").device_type == "cuda"
    share = None if on_gpus else _cache_share(config, replicas.most)
    session = replace(config.session, threads=cores, kv_cache_bytes=share)

    def make(progress: LoadProgress) -> ModelSpec:
        from llorch_serve.cluster.spec import ModelSpec, find_fingerprint, llorch_version

        found = (folder or export_source(target, progress)).resolve()
        settings = ReplicaSettings(
            model=LOCAL_NAME,
            artifact=str(found),
            fingerprint=find_fingerprint(str(found), None),
            version=llorch_version(),
            cores=cores,
            engine=replace(config, session=session, cache_sharing=queue.cache_sharing),
            otlp_endpoint=otlp_endpoint,
        )
        return ModelSpec(
            settings, replicas, gpus=1.0 if on_gpus else 0.0, max_queued=queue.max_queued_requests
        )

    return Elsewhere(
        "Ray on this machine",
        lambda: local_cluster(cores * replicas.most, gpus=None if on_gpus else 0),
        deployed_here(make),
        elsewhere.resume_streams,
    )


def _check_stages(config: EngineConfig) -> None:
    """Raise UsageError for places of stages, which replicas do not choose among."""
    if config.session.stages != StageChoice():
        raise UsageError(
            "--stage-device and --stage-processes have no effect with --replicas, each of which runs all "
            "stages in its process; leave one of them out"
        )


def _cache_share(config: EngineConfig, replicas: int) -> int | None:
    """Return the bytes that the cache of each replica may grow to, as they share this machine's memory."""
    if config.session.kv_cache_bytes is not None or replicas == 1:
        return config.session.kv_cache_bytes
    share = psutil.virtual_memory().available // (2 * replicas)
    note(f"the KV cache of each replica may take {share / 2**30:.1f} GiB; --kv-cache-memory says otherwise")
    return share


def settings_there(model: str | None) -> Callable[[LoadProgress], ReplicaSettings]:
    """Return what finds a model that the cluster runs already."""

    def find(_progress: LoadProgress) -> ReplicaSettings:
        from llorch_serve.cluster.deploy import find_settings

        return find_settings(model)

    return find


def deployed_here(make: Callable[[LoadProgress], ModelSpec]) -> Callable[[LoadProgress], ReplicaSettings]:
    """Return what deploys a model and waits until its replicas run. make: says what should run."""

    def run(progress: LoadProgress) -> ReplicaSettings:
        from llorch_serve.cluster.deploy import await_running, deploy
        from llorch_serve.observe.replica import ObservedReplica

        def tell(status: ModelStatus) -> None:
            say(f"{status.running} of {status.wanted} replicas run")

        model = make(progress)
        deploy([model], ObservedReplica)
        await_running([model.name], START_S, tell, check=progress.check)
        return model.settings

    return run
