"""``llorch score``: how likely continuations of a context are, from an artifact in this process or from a
running worker.
"""

from __future__ import annotations

import uuid
from typing import Annotated

import typer

from llorch_serve.config import EngineConfig
from llorch_serve.requests import ContinuationScore, ScoreRequest, TextPrompt
from llorch_serve.terminal.access import WorkerFlags
from llorch_serve.terminal.answers import logprobs_document
from llorch_serve.terminal.console import write, write_json
from llorch_serve.terminal.generators import open_generator
from llorch_serve.terminal.groups import composed, only
from llorch_serve.terminal.sampling_flags import Logprobs, refuse_logprobs
from llorch_serve.terminal.session_flags import ProviderFlags, SessionFlags
from llorch_serve.terminal.target import ModelFlags


@composed
def command(
    continuation: Annotated[
        list[str], typer.Option(help="Text that follows the context; may be repeated.", show_default=False)
    ],
    model: ModelFlags,
    worker: WorkerFlags,
    context: Annotated[str, typer.Option(help="What the continuations follow; empty: BOS, or EOS.")] = "",
    logprobs: Logprobs = None,
    *,
    session: Annotated[SessionFlags, only("max_context", "stage_device", "stage_processes")],
    threads: Annotated[ProviderFlags, only("threads")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of lines.")
    ] = False,
) -> None:
    """Print the log-likelihood of each continuation of a context, and whether greedy decoding would have said
    it.

    For example:

        llorch score artifacts/smollm2 --context "The capital of France is" --continuation " Paris"
        --continuation " Rome"

    """
    refuse_logprobs("--logprobs", logprobs, as_json=as_json)
    texts = tuple(map(TextPrompt, continuation))
    request = ScoreRequest(str(uuid.uuid4()), TextPrompt(context), texts, logprobs)

    def config() -> EngineConfig:
        return EngineConfig(session=session.config(threads, slots=1))

    with open_generator(
        model, worker, [*session.given(), *threads.given()], config, chats=False
    ) as generator:
        scores = generator.score(request)
    if as_json:
        write_json({"scores": [_document(*pair) for pair in zip(continuation, scores, strict=True)]})
        return
    for text, score in zip(continuation, scores, strict=True):
        greedy = "greedy" if score.is_greedy else "      "
        write(f"{score.logprob:12.4f}  {score.token_count:5} tokens  {greedy}  {text!r}\n")


def _document(text: str, score: ContinuationScore) -> dict[str, object]:
    document: dict[str, object] = {
        "continuation": text,
        "logprob": score.logprob,
        "is_greedy": score.is_greedy,
        "token_count": score.token_count,
        "context_tokens": score.context_tokens,
        "cached_tokens": score.cached_tokens,
    }
    if score.logprobs:
        document["logprobs"] = logprobs_document(score.logprobs)
    return document
