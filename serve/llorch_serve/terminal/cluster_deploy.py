"""``llorch cluster deploy``: models of a file made to run in a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llorch_serve.terminal.cluster_flags import ClusterFlags
from llorch_serve.terminal.cluster_output import ModelRow, line_of, table_of
from llorch_serve.terminal.console import note, say, write, write_json
from llorch_serve.terminal.groups import composed


@composed
def command(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.toml", help="What should run; see docs/cluster.md.", show_default=False),
    ],
    *,
    cluster: ClusterFlags,
    wait: Annotated[
        float, typer.Option("--wait", min=0, metavar="SECONDS", help="How long replicas may take to run.")
    ] = 1800.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Run models on a Ray cluster: as many replicas of each as the file says, kept so by Ray.

    The same file again restarts nothing. A changed artifact or setting replaces replicas while others answer.
    Models that the file does not name go on. The command returns when all replicas run, and fails if one
    cannot.

    For example:

        llorch cluster deploy cluster.toml --address 10.0.0.5:6379

        LLORCH_CLUSTER=10.0.0.5:6379 llorch cluster deploy cluster.toml --json

    """
    from llorch_serve.cluster.spec_file import load_spec

    models = load_spec(file)
    for model in models:
        if model.shares_memory:
            note(
                f"kv_cache_memory of {model.name} is not given, so that each replica takes most of what is "
                "free on its node; give it where replicas share a node"
            )
    names = [model.name for model in models]
    with cluster.joined():
        from llorch_serve.cluster.deploy import await_running, deploy, statuses
        from llorch_serve.observe.replica import ObservedReplica

        deploy(models, ObservedReplica)
        found = await_running(names, wait, lambda status: say(line_of(status)))
        for other in statuses():
            if other.name not in names:
                note(f"{other.name} goes on, which {file} does not name; llorch cluster delete ends it")
    if as_json:
        write_json({"models": [ModelRow.of(status) for status in found]})
    else:
        write(table_of(found))
