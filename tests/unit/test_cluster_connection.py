"""Ray joins and starts nothing by itself."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

CODE = """
from llorch_serve.cluster.connection import _set_up
_set_up()
import ray
try:
    ray.nodes()
except Exception as error:
    print(type(error).__name__)
print(ray.is_initialized())
"""


# Not imported here: Ray reads the environment once, which the cluster of the tests sets first.
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_process_that_has_left_its_cluster_gets_no_other_one():
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert result.stdout == "RaySystemError\nFalse\n"


THROUGH_A_PROXY = """
import os
from concurrent.futures import ThreadPoolExecutor
from llorch_serve.cluster.connection import _set_up
_set_up()
_set_up()
print(os.environ["no_grpc_proxy"])
import grpc
server = grpc.server(ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    grpc.channel_ready_future(channel).result(20)
server.stop(None)
"""


@pytest.mark.parametrize(
    ("spared", "left"),
    [({}, ""), ({"NO_PROXY": "a.example"}, "a.example,"), ({"no_grpc_proxy": "b", "no_proxy": "c"}, "b,")],
    ids=str,
)
def test_replicas_are_reached_without_a_proxy(spared: dict[str, str], left: str) -> None:
    proxies = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    inherited = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    run = [sys.executable, "-c", THROUGH_A_PROXY]
    result = subprocess.run(run, capture_output=True, text=True, env=inherited | proxies | spared)
    assert (result.stdout, result.returncode) == (f"{left}0.0.0.0/0,::/0\n", 0), result.stderr


TOLD = """
from llorch_serve.cluster.ray_internals import log_messages
log_messages()
from ray._private import worker
assert "print_to_stdstream" in worker.listen_error_messages.__code__.co_names
told = {"lines": ["a node is dead"], "pid": "raylet", "is_err": False}
worker.print_to_stdstream(told, ignore_prefix=False)
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_what_ray_tells_of_nodes_does_not_get_among_a_commands_document():
    result = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, check=True)
    assert result.stdout == ""


WITHOUT_RAY = """
import importlib, pkgutil, sys
import llorch_serve

class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name == "ray" or name.startswith("ray."):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, NoRay())
for module in pkgutil.walk_packages(llorch_serve.__path__, "llorch_serve."):
    if module.name not in ("llorch_serve.cluster.router", "llorch_serve.__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in ("lm_eval", "datasets"):  # of the extra for evaluation
                raise
print("ray" in sys.modules)
"""


def test_nothing_of_llorch_imports_ray_but_what_ray_itself_loads():
    result = subprocess.run([sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("False\n", "")
