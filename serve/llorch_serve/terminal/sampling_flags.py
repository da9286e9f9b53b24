"""How tokens are chosen, as flags that ``generate`` and ``chat`` share."""

from __future__ import annotations

from typing import Annotated

import typer

Temperature = Annotated[
    float | None, typer.Option(help="0 to 2; 0 is greedy. Default: the model's, else 0.", show_default=False)
]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0: all.", show_default=False)]
TopP = Annotated[
    float | None, typer.Option(help="Keep the likeliest tokens that reach p together.", show_default=False)
]
MinP = Annotated[
    float | None, typer.Option(help="Drop tokens below p times the likeliest.", show_default=False)
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1: tokens already present become less likely.", show_default=False),
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", show_default=False)]
Stop = Annotated[
    list[str] | None, typer.Option(help="End before this string; may be repeated.", show_default=False)
]
System = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="What the model is told before it chats.", show_default=False),
]
TemplateArguments = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="Further variables of the chat template, like '{\"enable_thinking\": false}'.",
        show_default=False,
    ),
]
