"""Joining a Ray cluster that a person named, or starting one of this machine alone.

No process reports its use to Ray's makers, none joins a cluster that merely happens to be there, and the
handlers of signals stay those of llorch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from llorch_serve.cluster.head import HeadAddress, check_head, find_token
from llorch_serve.cluster.ray_internals import LARGE_ANSWERS, log_messages
from llorch_serve.errors import ProviderError, WorkerError

VERSIONS: Final = ("2.60.",)
"""Releases of Ray that this was tested with. Older ones took unauthenticated pickle between replicas."""
_PATIENCE: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
_SPARED: Final = "no_grpc_proxy"
_ADDRESSES: Final = "0.0.0.0/0,::/0"  # all that are no names
STORE_BYTES: Final = 80 * 2**20  # Ray's least; nothing of llorch's lies in the store of objects


@contextlib.contextmanager
def joined(head: HeadAddress, note: Callable[[str], None]) -> Iterator[None]:
    """Be a driver of the cluster at ``head``. A process that is one already, of the same cluster, stays one.

    note: told what a person should know of the cluster.
    Raises what :func:`llorch_serve.cluster.head.check_head` does, ModuleNotFoundError without Ray Serve,
    ProviderError for a version of it that was not tested, and WorkerError where Ray refuses.
    """
    check_version()
    token = find_token(os.environ, Path.home())
    check_head(head, token, note)
    if token is not None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # or Ray might keep it to itself
    _set_up()
    # Without a head this process is to say so and end in order, before Ray ends it at once.
    os.environ.setdefault(_PATIENCE, "3600")
    import ray
    import ray.serve  # what is missing of it is told before anything is joined

    if ray.is_initialized():
        _check_same(head)
        with told_failures(f"the cluster at {head}"):
            yield
        return
    log_messages()
    with same_signals():
        try:
            ray.init(address=str(head), log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise WorkerError(_refusal(head, error)) from error
    _quiet()
    try:
        with told_failures(f"the cluster at {head}"):
            yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def local_cluster(cores: int, gpus: int | None) -> Iterator[None]:
    """Run a cluster of this machine, which ends with the context. cores, gpus: that
    replicas may take; None: all GPUs that there are.

    Raises ProviderError for a version of Ray that was not tested, WorkerError where Ray does not start.
    """
    check_version()
    # Ray listens on every address of the machine, so nobody gets in without this token, which nobody is told.
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32)
    )
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # Ray forks as it ends, and gRPC would tell of each
    _set_up()
    import ray

    log_messages()
    with same_signals():
        try:
            ray.init(
                address="local",
                num_cpus=cores,
                num_gpus=gpus,
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise WorkerError(
                f"Ray does not start here ({_first_line(error)}); see /tmp/ray/session_latest/logs"
            ) from error
    _quiet()
    try:
        yield
    finally:
        ray.shutdown()


def _set_up() -> None:
    """Set what Ray, which is not imported yet, reads of the environment.

    It does not join or start a cluster by itself: what is left of a handle would do so once this process has
    left its own. Replicas are reached by their addresses, without a proxy, as all else of Ray is.
    """
    os.environ.update(LARGE_ANSWERS, RAY_ENABLE_AUTO_CONNECT="0")
    # gRPC reads the one alone where there are both.
    kept = os.environ.get(_SPARED, os.environ.get("no_proxy", os.environ.get("NO_PROXY", "")))
    if not kept.endswith(_ADDRESSES):
        os.environ[_SPARED] = f"{kept},{_ADDRESSES}".lstrip(",")


@contextlib.contextmanager
def told_failures(cluster: str) -> Iterator[None]:
    """Raise WorkerError for what Ray raises, in one line. cluster: what it is called there."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        yield
    except (RayError, RayServeException, ConnectionError) as error:
        raise WorkerError(f"{cluster} failed: {_first_line(error)}") from error


def _quiet() -> None:
    """Keep Serve's own log of what this process does off the terminal; what goes wrong is told by llorch."""
    import ray.serve  # noqa: F401 - which sets its logger up

    logging.getLogger("ray.serve").setLevel(logging.ERROR)


def head_of_this() -> HeadAddress:
    """Return the head of the cluster that this process has joined."""
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return HeadAddress(host, int(port))


def check_version() -> None:
    """Raise ProviderError unless Ray is here in a version that was tested; ModuleNotFoundError without it.

    Ray is not imported yet: it reads the environment as it is.
    """
    try:
        found = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError("No module named 'ray'", name="ray") from error
    if not found.startswith(VERSIONS):
        raise ProviderError(
            f"ray {found} is installed, and llorch was tested with {VERSIONS[0]}x alone; install that with: "
            "pip install 'llorch[ray]'"
        )


def _check_same(head: HeadAddress) -> None:
    """Raise WorkerError where this process is in another cluster."""
    import ray

    there = ray.get_runtime_context().gcs_address
    if there.rpartition(":")[2] != str(head.port):
        raise WorkerError(f"this process is in the cluster at {there} already, and {head} was named")


def _refusal(head: HeadAddress, error: Exception) -> str:
    said = _first_line(error)
    if "node" in said.lower() and "ip" in said.lower():
        return (
            f"this machine is no node of the cluster at {head} ({said}); run the command on one, or join "
            f"with ray start --address {head} --num-cpus 0"
        )
    return f"the cluster at {head} was not joined: {said}"


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


@contextlib.contextmanager
def same_signals() -> Iterator[None]:
    """Give the handler of SIGTERM back, which Ray takes on the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
