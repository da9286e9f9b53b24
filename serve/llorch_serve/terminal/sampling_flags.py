"""How tokens are chosen, as flags: those that ``generate`` and ``chat`` share, and the others of
``generate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from llorch_serve.errors import UsageError

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
MinTokens = Annotated[int, typer.Option(help="Stop tokens are impossible before so many.")]
TypicalP = Annotated[
    float | None,
    typer.Option(help="Keep the tokens of most typical surprise that reach p together.", show_default=False),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(help="-2 to 2; above 0: tokens of the answer become less likely.", show_default=False),
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="The same for every time a token is there.", show_default=False)
]
RepeatLastN = Annotated[
    int | None,
    typer.Option(
        help="Tokens back that penalties look; 0: none, -1: all. Default: the model's, else all.",
        show_default=False,
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=BIAS",
        help="Add -100 to 100 to a token's logit; may be repeated.",
        show_default=False,
    ),
]
StopTokenId = Annotated[
    list[int] | None, typer.Option(help="End at this token; may be repeated.", show_default=False)
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="The model's stop tokens do not end it.")]
KeepSpecialTokens = Annotated[
    bool, typer.Option("--keep-special-tokens", help="Show special tokens in the text.")
]
Answers = Annotated[int, typer.Option(help="Answers, each with a seed of its own (1 to 16).")]
BestOf = Annotated[
    int | None,
    typer.Option(help="Generate so many, and show the n likeliest by mean.", show_default=False),
]


def read_bias(given: Sequence[str]) -> dict[int, float]:
    """Return the biases by token id. Raises UsageError for anything but an id and a number, and for an id
    given twice.
    """
    bias: dict[int, float] = {}
    for text in given:
        token, _, value = text.partition("=")
        try:
            token_id, number = int(token), float(value)
        except ValueError as error:
            raise UsageError(
                f"--logit-bias is {text!r}; expected a token id and a number, like 123=-5"
            ) from error
        if token_id in bias:
            raise UsageError(f"--logit-bias names token {token_id} twice; give it once")
        bias[token_id] = number
    return bias
