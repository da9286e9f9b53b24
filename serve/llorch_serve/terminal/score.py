"""``llorch score``: how likely continuations of a context are, from an artifact in this process or from a
running worker.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.errors import UsageError
from llorch_serve.requests import ContinuationScore, ScoreRequest, TextPrompt
from llorch_serve.terminal.access import TlsCa, TlsCert, TlsKey, Token, read_access, refuse_access
from llorch_serve.terminal.answers import places
from llorch_serve.terminal.console import write, write_json
from llorch_serve.terminal.flags import Connect, MaxContext, Model, ModelDir, Threads, Wait
from llorch_serve.terminal.target import (
    find_target,
    find_tokenizer,
    refuse_local_flags,
    refuse_wait,
    resolve_artifact,
)

if TYPE_CHECKING:
    from llorch_serve.client.channel import Access


def command(
    continuation: Annotated[
        list[str], typer.Option(help="Text that follows the context; may be repeated.", show_default=False)
    ],
    model_dir: ModelDir = None,
    model: Model = None,
    connect: Connect = None,
    wait: Wait = None,
    token: Token = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    context: Annotated[str, typer.Option(help="What the continuations follow; empty: BOS, or EOS.")] = "",
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --json: each token's log-probability, and the N likeliest (0 to 20).",
            show_default=False,
        ),
    ] = None,
    max_context: MaxContext = None,
    threads: Threads = None,
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
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs shows in the JSON document alone; add --json")
    texts = tuple(map(TextPrompt, continuation))
    request = ScoreRequest(str(uuid.uuid4()), TextPrompt(context), texts, logprobs)
    if connect is not None:
        refuse_local_flags(
            connect,
            {"DIR": model_dir, "--model": model, "--max-context": max_context, "--threads": threads},
        )
        scores = _remote(connect, read_access(token, tls_ca, tls_cert, tls_key), wait, request)
    else:
        refuse_wait(wait)
        refuse_access(token, tls_ca, tls_cert, tls_key)
        session = SessionConfig(threads=threads, slots=1, max_context=max_context)
        scores = _local(resolve_artifact(find_target(model_dir, model)), session, request)
    if as_json:
        write_json({"scores": [_document(*pair) for pair in zip(continuation, scores, strict=True)]})
        return
    for text, score in zip(continuation, scores, strict=True):
        greedy = "greedy" if score.is_greedy else "      "
        write(f"{score.logprob:12.4f}  {score.token_count:5} tokens  {greedy}  {text!r}\n")


def _local(folder: Path, session: SessionConfig, request: ScoreRequest) -> Sequence[ContinuationScore]:
    from llorch_serve.terminal.opening import open_worker
    from llorch_serve.worker.local import score

    worker = open_worker(folder, EngineConfig(session=session), tokenizer=find_tokenizer())
    try:
        return score(worker, request)
    finally:
        worker.close()


def _remote(
    address: str, access: Access, wait: float | None, request: ScoreRequest
) -> Sequence[ContinuationScore]:
    from llorch_serve.client.blocking import WorkerClient

    with WorkerClient(address, access) as client:
        if wait:
            client.wait_until_ready(wait)
        return client.score(request)


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
        document["logprobs"] = places(score.logprobs)
    return document
