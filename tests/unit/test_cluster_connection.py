"""Ray joins and starts nothing by itself."""

from __future__ import annotations

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


def test_a_process_that_has_left_its_cluster_gets_no_other_one():
    pytest.importorskip("ray")
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert result.stdout == "RaySystemError\nFalse\n"
