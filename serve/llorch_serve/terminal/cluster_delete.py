"""``llorch cluster delete``: models that a Ray cluster runs no more."""

from __future__ import annotations

from typing import Annotated

import typer

from llorch_serve.errors import UsageError
from llorch_serve.terminal.cluster_flags import ClusterFlags
from llorch_serve.terminal.console import say, write, write_json
from llorch_serve.terminal.groups import composed


@composed
def command(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Names of models.", show_default=False)
    ] = None,
    *,
    cluster: ClusterFlags,
    everything: Annotated[bool, typer.Option("--all", help="Delete every model of the cluster.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """End models of a Ray cluster. New requests are refused at once; the command returns when running answers
    have ended, or drain_s of the model's file is over.

    For example:

        llorch cluster delete smollm2 --address 10.0.0.5:6379

        llorch cluster delete --all --address 10.0.0.5:6379

    """
    names = list(dict.fromkeys(models or ()))
    if everything and names:
        raise UsageError(f"--all has no effect beside {names[0]}; give one of them")
    if not everything and not names:
        raise UsageError("no model is named; give names, or --all")
    with cluster.joined():
        from llorch_serve.cluster.deploy import await_gone, delete, statuses

        if everything:
            names = [status.name for status in statuses()]
        delete(names)
        if names:
            say(f"deleting {', '.join(names)}; running answers end first")
        await_gone(names)
    if as_json:
        write_json({"deleted": names})
    else:
        write(f"deleted {', '.join(names) or 'nothing: the cluster has no model'}\n")
