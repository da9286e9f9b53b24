"""Flags that say how tokens are chosen, when an answer ends, and what comes with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from llorch_serve.errors import UsageError
from llorch_serve.requests import AnswerOptions
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.terminal.groups import FlagGroup


class SamplingFlags(FlagGroup, frozen=True):
    """How each token is chosen, and what ends an answer."""

    min_tokens: Annotated[int, typer.Option(help="Stop tokens are impossible before so many.")] = 0
    temperature: Annotated[
        float | None,
        typer.Option(help="0 to 2; 0 is greedy. Default: the model's, else 0.", show_default=False),
    ] = None
    top_k: Annotated[
        int | None, typer.Option(help="Keep the k likeliest tokens; 0: all.", show_default=False)
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(help="Keep the likeliest tokens that reach p together.", show_default=False),
    ] = None
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below p times the likeliest.", show_default=False)
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Above 1: tokens already present become less likely.", show_default=False),
    ] = None
    typical_p: Annotated[
        float | None,
        typer.Option(
            help="Keep the tokens of most typical surprise that reach p together.", show_default=False
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option(help="-2 to 2; above 0: tokens of the answer become less likely.", show_default=False),
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same for every time a token is there.", show_default=False)
    ] = None
    repeat_last_n: Annotated[
        int | None,
        typer.Option(
            help="Tokens back that penalties look; 0: none, -1: all. Default: the model's, else all.",
            show_default=False,
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=BIAS",
            help="Add -100 to 100 to a token's logit; may be repeated.",
            show_default=False,
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", show_default=False)] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this string; may be repeated.", show_default=False)
    ] = None
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="End at this token; may be repeated.", show_default=False)
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="The model's stop tokens do not end it.")
    ] = False
    keep_special_tokens: Annotated[
        bool, typer.Option("--keep-special-tokens", help="Show special tokens in the text.")
    ] = False

    def params(self, max_tokens: int | None) -> SamplingParams:
        """Return what a request asks for. Raises UsageError for a bias that is none."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repeat_last_n=self.repeat_last_n,
            logit_bias=_read_bias(self.logit_bias or ()),
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_id or ()),
            ignore_eos=self.ignore_eos,
            keep_special_tokens=self.keep_special_tokens,
        )


Logprobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="With --json: each token's log-probability, and the N likeliest (0 to 20).",
        show_default=False,
    ),
]


class AnswerFlags(FlagGroup, frozen=True):
    """How many answers there are, and what is shown besides their text."""

    logprobs: Logprobs = None
    n: Annotated[int, typer.Option(help="Answers, each with a seed of its own (1 to 16).")] = 1
    best_of: Annotated[
        int | None,
        typer.Option(help="Generate so many, and show the n likeliest by mean.", show_default=False),
    ] = None
    echo: Annotated[bool, typer.Option("--echo", help="Show the prompt's text before the answer.")] = False
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="With --json: the same for each token of the prompt.", show_default=False
        ),
    ] = None

    def options(self) -> AnswerOptions:
        """Return which answers a request asks for."""
        return AnswerOptions(self.n, self.best_of, self.prompt_logprobs, self.echo)

    def check(self, *, as_json: bool) -> None:
        """Raise UsageError for log-probabilities where no JSON shows them."""
        for flag, asked in (("--logprobs", self.logprobs), ("--prompt-logprobs", self.prompt_logprobs)):
            refuse_logprobs(flag, asked, as_json=as_json)


def refuse_logprobs(flag: str, asked: int | None, *, as_json: bool) -> None:
    """Raise UsageError if log-probabilities are asked for and no JSON shows them."""
    if asked is not None and not as_json:
        raise UsageError(f"{flag} shows in the JSON document alone; add --json")


def _read_bias(given: Sequence[str]) -> dict[int, float]:
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
