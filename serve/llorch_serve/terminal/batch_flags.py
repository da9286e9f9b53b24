"""Flags of ``llorch batch``: how its lines are read, in which order they are answered, and how it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
import typer

from llorch_serve.batch.plan import Order
from llorch_serve.terminal.groups import FlagGroup
from llorch_serve.terminal.sampling_flags import SamplingFlags

SLOTS: Final = 8
"""Sequences that run at once in this process, unless --concurrency says how many."""


class RunFlags(FlagGroup, frozen=True):
    """How a file is run."""

    ordered: Annotated[
        bool,
        typer.Option(
            "--ordered",
            help="Write answers in the order of the input, and compute them so that nothing else that runs, "
            "or ran before, changes a bit: a run that goes on writes the bytes of one that was never "
            "interrupted.",
        ),
    ] = False
    order: Annotated[
        Order,
        typer.Option(
            "--order",
            help="Which lines are answered first: as given, the longest, or those that begin alike together, "
            "so that what they share is computed once.",
        ),
    ] = Order.GIVEN
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            min=1,
            max=512,
            help="Lines that are answered at once. Default: 8, or as many as a worker has slots.",
            show_default=False,
        ),
    ] = None
    patience: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="For how long a worker may refuse every line, or be away, before the run ends.",
        ),
    ] = 300.0
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Answer the lines that failed in earlier runs again.")
    ] = False
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Read the whole input, say what is in it and what is wrong with it, and end."
        ),
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON document on stdout.")
    ] = False


def bare_settings(sampling: SamplingFlags, max_tokens: int) -> dict[str, Any]:
    """Return the fields that the body of a line gets that is a bare prompt or chat.

    Raises UsageError for a bias that is none.
    """
    defaults = dict(zip(sampling.__struct_fields__, sampling.__struct_defaults__, strict=True))
    values = {
        name: value for name, value in msgspec.structs.asdict(sampling).items() if value != defaults[name]
    }
    if "logit_bias" in values:
        bias: Mapping[int, float] = sampling.params(max_tokens).logit_bias
        values["logit_bias"] = {str(token): number for token, number in bias.items()}
    if "stop_token_id" in values:
        values["stop_token_ids"] = values.pop("stop_token_id")
    return {"max_tokens": max_tokens, **values}
