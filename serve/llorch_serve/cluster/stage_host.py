"""The stages of a replica, seen from it: an actor for each, started, loaded, called and ended.

Input: the settings of a replica, in the process that Ray runs it in. Output: hosts for
:func:`llorch_serve.stages.pipeline.open_pipeline`. Only bytes and numbers cross, which Ray does not pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from llorch_serve.artifact.folder import Artifact
from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.cluster.ray_internals import end_actor, start_in_bundle
from llorch_serve.cluster.settings import ReplicaSettings
from llorch_serve.cluster.stage_actor import StageActor
from llorch_serve.config import SessionConfig
from llorch_serve.errors import StageEndedError, UsageError
from llorch_serve.stages import control, wire
from llorch_serve.stages.calls import StagePort
from llorch_serve.stages.ending import Ending
from llorch_serve.stages.loading import StageRoom, StageSettings
from llorch_serve.stages.remote import RemotePort
from llorch_serve.stages.stage import StageFacts


class ActorHost:
    """A stage that an actor runs. Implements :class:`llorch_serve.stages.hosts.StageHost`.

    actor: a handle of a :class:`llorch_serve.cluster.stage_actor.StageActor`, which this ends. name: for
    messages.
    """

    def __init__(self, actor: Any, settings: StageSettings, name: str) -> None:
        self._actor = actor
        self._name = name
        self._ending = Ending()
        self._ports: dict[int, RemotePort] = {}
        self._answer = self._asked(control.ask_room(settings, (), ()))
        actor.stay.remote().future().add_done_callback(self._ended)

    def room(self) -> StageRoom:
        """See the protocol."""
        return self._take(control.Room).room

    def begin(self, lanes: Sequence[KvCapacity]) -> None:
        """See the protocol."""
        self._answer = self._asked(control.Load(lanes=tuple(lanes)))

    def facts(self) -> StageFacts:
        """See the protocol."""
        return self._take(control.Loaded).facts

    def port(self, lane: int) -> StagePort:
        """See the protocol."""
        return self._ports.setdefault(lane, RemotePort(partial(self._exchange, lane)))

    def when_ended(self, tell: Callable[[StageEndedError], None]) -> None:
        """See the protocol."""
        self._ending.when_ended(tell)

    def close(self) -> None:
        """See the protocol."""
        self._ending.close()
        end_actor(self._actor)

    def _exchange(self, lane: int, question: wire.Buffers) -> memoryview:
        """Return a lane's answer. Raises StageEndedError if there is none."""
        return memoryview(self._result(self._actor.answer.remote(lane, b"".join(question)).future()))

    def _asked(self, question: control.Question) -> Future[bytes]:
        found: Future[bytes] = self._actor.prepare.remote(control.write(question)).future()
        return found

    def _take(self, kind: type[control.A]) -> control.A:
        """Return the answer to what was asked. Raises what it tells of, StageEndedError if there is none."""
        return control.read_answer(memoryview(self._result(self._answer)), kind)

    def _result(self, awaited: Future[bytes]) -> bytes:
        from ray.exceptions import RayError

        try:
            return awaited.result()
        except RayError as error:
            raise self._failed(error) from None

    def _failed(self, error: BaseException) -> StageEndedError:
        """Return how the stage has ended, of what Ray says."""
        return StageEndedError(
            f"{self._name} has ended ({type(error).__name__}), and the keys and values of all sequences with "
            "it; the log of its actor may say why"
        )

    def _ended(self, stayed: Future[None]) -> None:
        """Tell everybody that the actor has ended. A thread of Ray's."""
        self._ending.tell(self._failed(stayed.exception() or EOFError()))


def start_stages(
    wanted: ReplicaSettings, artifact: Artifact, config: SessionConfig, lanes: int
) -> list[ActorHost]:
    """Start an actor for each stage, in the bundles of this replica's placement group.

    Raises UsageError where the artifact has other stages than were deployed.
    """
    share = wanted.stages
    assert share is not None, "asked for stages elsewhere alone"
    found = len(artifact.manifest.stages or ())
    if found != share.count:
        raise UsageError(
            f"{artifact.folder} has {found} stages, and {share.count} were deployed; correct stages.count of "
            f"{wanted.model}, and deploy again"
        )
    hosts: list[ActorHost] = []
    try:
        for number in range(share.count):
            actor = start_in_bundle(
                StageActor,
                (wanted.encode(), number),
                number,
                num_cpus=share.cores,
                num_gpus=share.gpus,
                memory=share.memory_bytes,
                max_concurrency=lanes + 2,  # besides calls: loading, and what never returns
            )
            settings = StageSettings(artifact, number, config, share.cores, gather=True)
            hosts.append(ActorHost(actor, settings, f"stage {number} of {wanted.model}"))
    except BaseException:
        for host in hosts:
            host.close()
        raise
    return hosts
