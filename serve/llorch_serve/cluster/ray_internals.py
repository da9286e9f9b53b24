"""What is used of Ray that it may change from one release to the next, but for the interface of routers
that ``router.py`` implements.

``tests/e2e/test_cluster_deploy.py``, ``tests/e2e/test_cluster_ray.py`` and
``tests/unit/test_cluster_connection.py`` try all of it. But for :func:`log_messages`, the process has joined
the cluster, see :mod:`llorch_serve.cluster.connection`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from llorch_serve.cluster.interfaces import MAX_PENDING_BYTES

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationDetails


logger = logging.getLogger(__name__)

_MOST_RECEIVED: Final = "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"
LARGE_ANSWERS: Final = {_MOST_RECEIVED: str(2**31 - 1)}
"""Variables of a front that Serve reads as it is imported: parts of answers would end at 4 MiB."""
LARGE_REQUESTS: Final = {_MOST_RECEIVED: str(MAX_PENDING_BYTES + 2**20)}
"""The same of a replica. Whoever reaches its port may have it hold as much before a token is asked for."""


def log_messages() -> None:
    """Have what Ray tells every process of nodes that end, and the like, logged. It prints that to standard
    output, among the documents that commands write there.
    """
    from ray._private import worker

    def log(data: dict[str, Any], ignore_prefix: bool) -> None:
        for line in data["lines"]:
            logger.info("Ray tells: %s", line)

    worker.print_to_stdstream = log


def applications() -> dict[str, ApplicationDetails]:
    """Return all that Serve runs, by name; nothing where it has not been started."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeInstanceDetails

    client = _get_global_client(raise_if_no_controller_running=False)
    return {} if client is None else ServeInstanceDetails(**client.get_serve_details()).applications


def begin_delete(application: str) -> None:
    """Have an application deleted, and return before it is: its replicas drain."""
    from ray import serve

    serve.delete(application, _blocking=False)


def versioned(deployment: Any, version: str) -> Any:
    """Return a deployment of which Serve replaces replicas where the version is another one."""
    return deployment.options(version=version, _internal=True)


def start_in_bundle(
    kind: type, arguments: tuple[object, ...], bundle: int, *, memory: int | None, **options: object
) -> Any:
    """Return a handle of an actor in a bundle of the placement group that Serve made for this replica.

    Ray ends the actor with the replica, and starts it but once. memory: in bytes; None: not counted.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.get_current_placement_group()
    assert group is not None, "deployed with bundles for stages"
    counted = {} if memory is None else {"memory": memory}
    made: Any = ray.remote(kind).options(
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
        **options,
        **counted,
    )
    return made.remote(*arguments)


def end_actor(actor: Any) -> None:
    """End an actor of this process, and what it is asked now, at once."""
    import ray

    ray.kill(actor)


def nodes_of_bundles() -> dict[str, list[str]]:
    """Return the address of the node of each bundle, empty where it has none yet, of every placement group,
    by name. Serve gives a replica's the name of the replica's actor.
    """
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
    return {
        group["name"]: [
            addresses.get(node, "") for _, node in sorted(group["bundles_to_node_id"].items(), key=_bundle)
        ]
        for group in ray.util.placement_group_table().values()
        if group["state"] != "REMOVED"
    }


def own_handle(deployment: str, application: str) -> Any:
    """Return a handle that shares no router with others. Serve keeps one for a deployment, whose router lets
    a few requests wait at the head for all: those of a model that is gone would hold up those of the one that
    replaced it.
    """
    from ray.serve.handle import DeploymentHandle

    return DeploymentHandle(deployment, application)


def direct(handle: Any, method: str) -> Any:
    """Return a method of a handle's whose parts come from the replica by gRPC. As objects of Ray they would
    take a multiple of the processor time on both sides.
    """
    import ray

    # Serve puts a port behind an IPv6 address without the brackets that gRPC needs.
    as_objects = ":" in ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    pickled = {"request_serialization": "pickle", "response_serialization": "pickle"}
    return handle.options(method_name=method, stream=True, _by_reference=as_objects, **pickled)


async def ask_all(handle: Any, method: str, arguments: tuple[object, ...], timeout_s: float) -> list[Any]:
    """Return what each replica answers that does in time; those that have just ended do not.

    timeout_s: for finding the replicas, and then for each of them.
    """
    from ray.serve.exceptions import DeploymentUnavailableError

    asked = handle.broadcast(method, *arguments)  # alpha
    try:
        # Ray's own way to await results knows one limit for all, after which it gives none of them.
        answers = await asyncio.wait_for(asked._fetch_replica_results_async(), timeout_s)
    except (DeploymentUnavailableError, TimeoutError):  # none is there
        return []
    each_in_time = (asyncio.wait_for(answer.get_async(), timeout_s) for answer in answers)
    found = await asyncio.gather(*each_in_time, return_exceptions=True)
    return [each for each in found if not isinstance(each, BaseException)]


def _bundle(placed: tuple[object, object]) -> int:
    return int(str(placed[0]))
