"""Flags of the commands of a cluster: which cluster it is, and how the answer looks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Final

import typer

from llorch_serve.errors import UsageError
from llorch_serve.terminal.console import note
from llorch_serve.terminal.groups import FlagGroup
from llorch_serve.terminal.requirements import required

CLUSTER_VARIABLE: Final = "LLORCH_CLUSTER"


class ClusterFlags(FlagGroup, frozen=True):
    """A running cluster."""

    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            envvar=CLUSTER_VARIABLE,
            help="The head of the Ray cluster, like 10.0.0.5:6379. This machine must be one of its nodes. "
            "Beyond the loopback it must ask for a token, see docs/cluster.md.",
            show_default=False,
        ),
    ] = None

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Be in the cluster. Raises UsageError if none was named, ProviderError without Ray, and what
        :func:`llorch_serve.cluster.connection.joined` does.
        """
        if self.address is None:
            raise UsageError(
                f"no cluster is named; give --address HOST:PORT of its head, or set {CLUSTER_VARIABLE}"
            )
        with joined_cluster("--address", self.address):
            yield


@contextlib.contextmanager
def joined_cluster(flag: str, address: str) -> Iterator[None]:
    """Be in the cluster whose head a flag named."""
    from llorch_serve.cluster.connection import joined
    from llorch_serve.cluster.head import read_head

    head = read_head(flag, address)
    with contextlib.ExitStack() as stack:
        with required("ray"):
            stack.enter_context(joined(head, note))
        yield
