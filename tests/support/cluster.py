"""A Ray cluster of this machine, for tests: one node, four logical cores, no dashboard, no usage reports.

The process that starts it is its driver, and its end is the cluster's. Calls need a token, which other
processes find in the environment.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from llorch_serve.cluster.connection import same_signals
from llorch_serve.cluster.ray_internals import LARGE_ANSWERS
from support.harness.cores import all_cores
from support.harness.processes import with_scripts

CORES = 4
STORE_BYTES = 80 * 2**20


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A running cluster that this process is connected to. address: HOST:PORT, for other processes."""

    address: str


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Start a cluster, with Serve but without Serve's proxies; end it afterwards."""
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_AUTO_CONNECT": "0",  # or what is left of a handle starts a cluster after this one
        **LARGE_ANSWERS,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # How often Ray hears how many requests there are, by which it chooses how many replicas run.
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        "OTEL_BSP_SCHEDULE_DELAY": "100",  # milliseconds between two sendings of spans, else 5,000
    }
    with mock.patch.dict(os.environ, with_scripts() | settings), warnings.catch_warnings():
        os.environ.pop("RAY_ADDRESS", None)  # a cluster of somebody else
        warnings.simplefilter("ignore")  # Ray's own
        import ray
        from ray import serve

        with same_signals(), all_cores():
            context = ray.init(
                address="local",
                num_cpus=CORES,
                num_gpus=0,
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
            )
        try:
            serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
            yield RayCluster(context.address_info["address"])
        finally:
            ray.shutdown()  # and all that runs there with it
