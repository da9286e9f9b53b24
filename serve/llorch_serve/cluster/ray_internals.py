"""What is used of Ray Serve that it may change from one release to the next, but for the interface of routers
that ``router.py`` implements.

``tests/e2e/test_cluster_deploy.py`` and ``tests/e2e/test_cluster_ray.py`` try all of it. The process has
joined the cluster, see :mod:`llorch_serve.cluster.connection`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationDetails


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


def own_handle(deployment: str, application: str) -> Any:
    """Return a handle that shares no router with others. Serve keeps one for a deployment, whose router lets
    a few requests wait at the head for all: those of a model that is gone would hold up those of the one that
    replaced it.
    """
    from ray.serve.handle import DeploymentHandle

    return DeploymentHandle(deployment, application)


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
