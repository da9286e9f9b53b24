"""A Ray cluster of three nodes on this machine, in a process of its own: nodes are lost while others go on.

As a program it is that process: it tells the head's address and the processes of the other nodes, and then
ends a node for each line on its stdin that names one.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from support.harness.cores import all_cores
from support.harness.processes import with_scripts

NODES = 3
STORE_BYTES = 80 * 2**20
_REPLICA = "ray::ServeReplica"
_STAGE = "ray::StageActor"


@dataclass(frozen=True)
class RayNodes:
    """Nodes. address: the head's, HOST:PORT. token: what a process shows that joins.

    others: the process that is each node but the head's, by which it is lost.
    """

    address: str
    token: dict[str, str]
    others: list[int]
    process: subprocess.Popen[str]

    def replicas_of(self, node: int) -> list[psutil.Process]:
        """Return the processes of replicas on a node."""
        return _titled(node, _REPLICA)

    def replicas(self) -> list[psutil.Process]:
        """Return the processes of replicas on all nodes."""
        return _titled(self.process.pid, _REPLICA)

    def stages_of(self, node: int) -> list[psutil.Process]:
        """Return the processes of stages on a node."""
        return _titled(node, _STAGE)

    def stages(self) -> list[psutil.Process]:
        """Return the processes of stages on all nodes."""
        return _titled(self.process.pid, _STAGE)

    def vanish(self, node: int) -> list[psutil.Process]:
        """Stop all processes of a node where they are, so that no connection closes; return them, to be
        killed.
        """
        raylet = psutil.Process(node)
        stopped = [raylet, *raylet.children(recursive=True)]
        for process in stopped:
            process.suspend()
        return stopped

    def lose(self, node: int) -> None:
        """Kill all processes of a node, which says nothing to anybody."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{node}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{node}\n"


@contextlib.contextmanager
def ray_nodes(cores: int = 1, **variables: str) -> Iterator[RayNodes]:
    """Start three nodes of so many logical cores, of which the first is the head and has a resource of that
    name; end what is left of them afterwards. variables: of their environment.
    """
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_AUTO_CONNECT": "0"}
    inherited = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    with all_cores():
        started = subprocess.Popen(
            [sys.executable, "-m", "support.ray_nodes", str(cores)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=with_scripts(inherited) | token | quiet | variables,
        )
    with started as process:
        assert process.stdout is not None
        assert process.stdin is not None
        told = json.loads(process.stdout.readline())
        everything = psutil.Process(process.pid).children(recursive=True)
        try:
            yield RayNodes(told["address"], token, told["others"], process)
        finally:
            everything += psutil.Process(process.pid).children(recursive=True)
            process.stdin.close()
            process.wait()
            _, left = psutil.wait_procs(set(everything), timeout=60)
            for one in left:
                one.kill()
    assert left == []


def _titled(above: int, begins: str) -> list[psutil.Process]:
    children = psutil.Process(above).children(recursive=True)
    return [one for one in children if _title(one).startswith(begins)]


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def main() -> None:
    """Run the nodes until stdin ends."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": int(sys.argv[1]), "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"resources": {"head": 1}})
    others = {_raylet(one): one for one in [cluster.add_node(**node) for _ in range(NODES - 1)]}
    sys.stdout.write(json.dumps({"address": cluster.address, "others": list(others)}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        cluster.remove_node(others[int(line)], allow_graceful=False)
        sys.stdout.write(line)
        sys.stdout.flush()
    cluster.shutdown()


def _raylet(node: object) -> int:
    [process] = node.all_processes["raylet"]  # type: ignore[attr-defined]
    return process.process.pid


if __name__ == "__main__":
    main()
