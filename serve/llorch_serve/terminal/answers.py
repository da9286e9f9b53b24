"""What ``llorch generate`` and ``llorch score`` print: answers as text or JSON, and log-probabilities as
JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llorch_serve.errors import LlorchError
from llorch_serve.requests import GenerationUpdate, JoinedUpdates, whole_calls
from llorch_serve.sampling.logprobs import TokenLogprob, TokenLogprobs
from llorch_serve.terminal.console import say, show_aside, write, write_json


def show_answers(updates: Iterator[GenerationUpdate], count: int, *, as_json: bool) -> None:
    """Print ``count`` answers on stdout: one alone as it comes, several when all have ended."""
    streams, thinks = count == 1 and not as_json, False
    found: dict[int, JoinedUpdates] = {}
    for update in updates:
        if (parts := found.get(update.index)) is None:
            found[update.index] = JoinedUpdates(update)
        else:
            parts.add(update)
        if streams:
            if update.reasoning:
                show_aside(update.reasoning, end="")
                thinks = True
            if update.text and thinks:
                show_aside("")
                thinks = False
            write(update.text)
    answers = [found[index].joined() for index in sorted(found)]
    if len(answers) != count or any(answer.completion is None for answer in answers):
        raise LlorchError("an answer ended without a completion; please report this")
    if as_json:
        write_json(_document(answers[0]) if count == 1 else {"answers": list(map(_document, answers))})
    elif streams:
        write("\n")
        _say_more(answers[0], "")
    else:
        for answer in answers:
            write(f"[{answer.index}] {answer.text}\n")
            _say_more(answer, f"[{answer.index}] ")


def _say_more(answer: GenerationUpdate, label: str) -> None:
    """Say what an answer holds besides its text, and why it ended if that was not its own doing."""
    if calls := whole_calls(answer.tool_calls):
        names = ", ".join(call.name for call in calls)
        show_aside(f"({label}calls {names}; --json shows with what)")
    completion = answer.completion
    if completion is not None and completion.reason.value == "length":
        tokens = completion.generated_tokens
        say(f"({label}ended after {tokens} tokens: the limit of --max-tokens or of the context)")


def _document(answer: GenerationUpdate) -> dict[str, object]:
    completion = answer.completion
    assert completion is not None
    document: dict[str, object] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": completion.reason.value,
        "stop_matched": completion.stop_matched,
        "prompt_tokens": completion.prompt_tokens,
        "generated_tokens": completion.generated_tokens,
        "cached_tokens": completion.cached_tokens,
        "drafted_tokens": completion.drafted_tokens,
        "accepted_tokens": completion.accepted_tokens,
        "seed": completion.seed,
        "timings": completion.timings,
    }
    if answer.reasoning:
        document["reasoning"] = answer.reasoning
    if calls := whole_calls(answer.tool_calls):
        document["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments} for call in calls
        ]
    if answer.logprobs:
        document["logprobs"] = logprobs_document(answer.logprobs)
    if answer.prompt_logprobs:
        document["prompt_logprobs"] = logprobs_document(answer.prompt_logprobs)
    return document


def logprobs_document(logprobs: Iterable[TokenLogprobs]) -> list[dict[str, object]]:
    """Return log-probabilities for a JSON document."""
    return [{**_token(place.chosen), "top": [_token(token) for token in place.top]} for place in logprobs]


def _token(token: TokenLogprob) -> dict[str, object]:
    return {
        "token_id": token.token_id,
        "logprob": token.logprob,
        "text": token.text,
        "bytes": list(token.raw),
    }
