"""A worker elsewhere, or the front of a cluster, asked over many calls at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.errors import InvalidRequestError, QueueFullError
from llorch_serve.evaluation.asking import Said, Scored
from llorch_serve.requests import GenerationRequest, ModelInfo, Prompt, ScoreRequest

LEAST_CALLS: Final = 8
MOST_CALLS: Final = 128
PATIENCE_S: Final = 600.0
"""For how long a request is sent again to a worker whose queue is full."""

Asked = TypeVar("Asked", ScoreRequest, GenerationRequest)
Answer = TypeVar("Answer")


class RemoteModel:
    """A worker behind a client. Implements :class:`llorch_serve.evaluation.asking.AskedModel`.

    Twice as many calls as the worker has slots are under way, so that none of them is ever idle. The worker
    must serve the same model to the end: requests name its fingerprint.
    """

    def __init__(self, client: WorkerClient, sleep: Callable[[float], None] = time.sleep) -> None:
        self._client = client
        self._sleep = sleep
        self.info: ModelInfo = client.model_info()
        self._calls = min(max(LEAST_CALLS, 2 * self.info.slots), MOST_CALLS)

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt and the text they stand for."""
        return self._client.tokenize(prompt)

    def score(self, requests: Sequence[ScoreRequest], advance: Callable[[], None]) -> list[Scored]:
        """Return the scores of each request's continuations, in order."""
        return self._each(self._client.score, requests, advance)

    def generate(self, requests: Sequence[GenerationRequest], advance: Callable[[], None]) -> list[Said]:
        """Return the text of each request's first answer, in order."""
        return self._each(self._text, requests, advance)

    def _text(self, request: GenerationRequest) -> str:
        return self._client.complete(request)[0].text

    def _each(
        self, call: Callable[[Asked], Answer], requests: Sequence[Asked], advance: Callable[[], None]
    ) -> list[Answer | InvalidRequestError]:
        found: list[Answer | InvalidRequestError] = []
        pool = ThreadPoolExecutor(self._calls, "llorch-eval")
        try:
            for answer in pool.map(lambda request: self._patiently(call, request), requests):
                found.append(answer)
                advance()
        finally:
            # After an error the others' answers are of no use; those under way end with the connection.
            pool.shutdown(wait=len(found) == len(requests), cancel_futures=True)
        return found

    def _patiently(self, call: Callable[[Asked], Answer], request: Asked) -> Answer | InvalidRequestError:
        waited = 0.0
        while True:
            try:
                return call(request)
            except InvalidRequestError as error:
                return error
            except QueueFullError as error:
                pause = max(error.retry_after_s, 0.1)
                waited += pause
                if waited > PATIENCE_S:
                    raise
                self._sleep(pause)
