"""``llorch push``: an artifact into a hub repository, with a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llorch_serve.errors import UsageError
from llorch_serve.hub.reference import parse_reference
from llorch_serve.terminal.console import say, write, write_json
from llorch_serve.terminal.requirements import require_hub_client


def command(
    artifact: Annotated[Path, typer.Argument(help="Artifact folder.", show_default=False)],
    repository: Annotated[
        str,
        typer.Argument(help="Hub repository: org/name, or org/name@BRANCH.", show_default=False),
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository, if it is new, private.")
    ] = False,
    licence: Annotated[
        str | None,
        typer.Option(
            "--license",
            metavar="NAME",
            help="The licence's name at the hub, as apache-2.0. Default: the licence file of the artifact.",
            show_default=False,
        ),
    ] = None,
    fidelity: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What llorch verify --json printed, for the card. Default: only the recipe's limit is told.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Put an artifact into a repository of a model hub, with a model card, in one commit.

    The card tells recipe, fidelity, provenance and licence; one that somebody wrote is left as it is.
    HF_TOKEN must be allowed to write.

    For example:

        llorch push artifacts/smollm2 my-org/smollm2-onnx --license apache-2.0

    """
    require_hub_client()
    from llorch_serve.hub.card import read_fidelity
    from llorch_serve.hub.push import push

    reference = parse_reference(repository)
    if reference is None:
        raise UsageError(f"{repository[:200]!r} is no hub repository; expected org/name or org/name@BRANCH")
    report = None if fidelity is None else read_fidelity(fidelity)
    commit, kept = push(artifact, reference, private=private, licence=licence, fidelity=report)
    if kept:
        say(f"note: README.md of {reference} was not written by llorch push, and is left as it is")
    if as_json:
        write_json({"repository": reference.repository, "commit": commit})
    else:
        write(f"{reference} has {artifact} as commit {commit}\n")
