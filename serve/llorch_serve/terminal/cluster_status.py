"""``llorch cluster status``: which models a Ray cluster runs, and how they are."""

from __future__ import annotations

from typing import Annotated

import typer

from llorch_serve.terminal.cluster_flags import ClusterFlags
from llorch_serve.terminal.cluster_output import ModelRow, table_of
from llorch_serve.terminal.console import write, write_json
from llorch_serve.terminal.groups import composed


@composed
def command(
    *,
    cluster: ClusterFlags,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Show every model of a Ray cluster: its state, its replicas and their nodes, and its artifact.

    For example:

        llorch cluster status --address 10.0.0.5:6379

        llorch cluster status --address 10.0.0.5:6379 --json

    """
    with cluster.joined():
        from llorch_serve.cluster.deploy import statuses

        found = statuses()
    if as_json:
        write_json({"models": [ModelRow.of(status) for status in found]})
    else:
        write(table_of(found))
