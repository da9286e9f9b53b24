"""Flags of ``llorch serve`` for a front whose model runs elsewhere: in a Ray cluster, its own or not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_serve.errors import UsageError
from llorch_serve.terminal.groups import FlagGroup

if TYPE_CHECKING:
    from llorch_serve.cluster.head import HeadAddress
    from llorch_serve.cluster.spec import ReplicaRange


class ReplicaFlags(FlagGroup, frozen=True):
    """Many replicas instead of a model in this process."""

    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="HOST:PORT",
            help="Answer by the replicas of a model that llorch cluster deploy runs in the Ray cluster with "
            "this head; --model is its name there, if there are several. Needs the extra ray.",
            show_default=False,
        ),
    ] = None
    replicas: Annotated[
        str | None,
        typer.Option(
            "--replicas",
            metavar="N|MIN:MAX",
            help="Run so many replicas of the model on this machine, by a Ray of their own, each with "
            "--threads cores. Needs the extra ray.",
            show_default=False,
        ),
    ] = None
    resume_streams: Annotated[
        bool,
        typer.Option(
            "--resume-streams/--no-resume-streams",
            help="With --cluster or --replicas: an answer whose replica ends goes on in another one, from "
            "the tokens that have been told.",
        ),
    ] = False

    @property
    def wanted(self) -> bool:
        """Whether replicas answer, and not a model in this process."""
        return self.cluster is not None or self.replicas is not None

    def head(self) -> HeadAddress | None:
        """Return the cluster that ``--cluster`` names, if it is given. Raises UsageError for flags that do
        not go together.
        """
        from llorch_serve.cluster.head import read_head

        if self.cluster is not None and self.replicas is not None:
            raise UsageError(
                "--replicas has no effect with --cluster, where the file says how many; leave it out"
            )
        if self.resume_streams and not self.wanted:
            raise UsageError("--resume-streams has no effect without --cluster or --replicas; leave it out")
        return None if self.cluster is None else read_head("--cluster", self.cluster)

    def range(self) -> ReplicaRange:
        """Return how many replicas ``--replicas`` asks for. Raises UsageError."""
        from llorch_serve.cluster.spec import read_replicas

        assert self.replicas is not None
        return read_replicas("--replicas", self.replicas)


def refuse_in_cluster(*given: list[str]) -> None:
    """Raise UsageError for flags of the model that were set, which the cluster's file says, and for the
    variables that name files of a model.
    """
    for flag in (flag for flags in given for flag in flags):
        raise UsageError(
            f"{flag} has no effect with --cluster, where the deployed file says it; leave it out"
        )
    if os.environ.get("TOKENIZER_PATH"):
        raise UsageError("TOKENIZER_PATH has no effect with --cluster, whose artifact has its own; unset it")
