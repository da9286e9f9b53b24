"""Whose prompts show in what was cached: one caller's and no other's, over gRPC and HTTP, unless the operator
says otherwise.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.client.channel import Access
from llorch_serve.config import CacheSharing, EngineConfig
from llorch_serve.requests import GenerationRequest, ScoreRequest, TokenPrompt
from llorch_serve.rpc.security import Security
from llorch_serve.sampling.params import SamplingParams
from support.harness.http import running_front, send
from support.harness.rpc import running_server
from support.harness.worker import make_session, make_worker

PROMPT = tuple(range(40, 60))
CACHED = len(PROMPT) - 2
SAMPLING = SamplingParams(temperature=0, max_tokens=1)


@contextmanager
def served(tmp_path, tokens=("one", "another"), **config):
    """Yield what asks for the prompt over gRPC, with a token or none and as a client, and tells how much of
    it was cached.
    """
    worker = make_worker(tmp_path, make_session(slots=12), config=EngineConfig(**config))
    try:
        with running_server(worker, security=Security(tokens=tokens)) as running:

            def ask(token=None, client="c", *, score=False):
                with WorkerClient(running.address, Access(token=token)) as channel:
                    if score:
                        asked = ScoreRequest("s", TokenPrompt(PROMPT), (TokenPrompt((1,)),), client_id=client)
                        return channel.score(asked)[0].cached_tokens
                    asked = GenerationRequest("r", TokenPrompt(PROMPT), SAMPLING, client_id=client)
                    return channel.complete(asked)[-1].completion.cached_tokens

            ask.worker = worker
            yield ask
    finally:
        worker.close()


@pytest.mark.parametrize("score", [False, True], ids=["generate", "score"])
def test_callers_that_are_known_share_nothing(tmp_path, score):
    with served(tmp_path) as ask:
        assert ask("one", "c") == 0
        assert ask("another", "c", score=score) == 0, "a stranger's prompt shows"
        assert ask("one", "d", score=score) >= CACHED
        assert ask("another", "d", score=score) >= CACHED


def test_callers_that_are_not_known_share_by_default(tmp_path):
    with served(tmp_path, tokens=()) as ask:
        assert [ask(client="c"), ask(client="d")] == [0, CACHED]


@pytest.mark.parametrize("tokens", [("one",), ()], ids=["known", "not known"])
def test_clients_of_one_caller_share_nothing_where_that_is_asked(tmp_path, tokens):
    token = tokens[0] if tokens else None
    with served(tmp_path, tokens, cache_sharing=CacheSharing.CLIENT) as ask:
        assert [ask(token, "c"), ask(token, "d"), ask(token, "c"), ask(token, "d")] == [0, 0, CACHED, CACHED]


def test_a_clients_name_does_not_open_another_callers_cache(tmp_path):
    with served(tmp_path, cache_sharing=CacheSharing.CLIENT) as ask:
        assert [ask("one", "c"), ask("another", "c"), ask("one", "c")] == [0, 0, CACHED]


def test_everybody_shares_where_that_is_asked(tmp_path):
    with served(tmp_path, cache_sharing=CacheSharing.ALL) as ask:
        assert [ask("one"), ask("another")] == [0, CACHED]


def test_a_caller_is_the_same_over_http(tmp_path):
    with served(tmp_path) as ask, running_front(ask.worker, token="one") as front:

        def post(token):
            body = {"prompt": list(PROMPT), "max_tokens": 1, "temperature": 0}
            found = send(front.port, "POST", "/v1/completions", body, {"Authorization": f"Bearer {token}"})
            return found.document["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert ask("one") == 0
        assert [post("another"), post("one"), post("another")] == [0, CACHED, CACHED]
        assert ask("another") == CACHED
