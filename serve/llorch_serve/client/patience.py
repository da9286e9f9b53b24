"""Waiting for a worker that has gone away, as it does while it is restarted or a replica of it is replaced.

Input: calls that can be sent again. Output: their answers, or the error of one that no waiting mends. All of
a client's calls wait together, and the worker that comes back must serve the model that it did.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from llorch_serve.client.asynchronous import AsyncWorkerClient
from llorch_serve.errors import (
    AuthenticationError,
    InvalidRequestError,
    LlorchError,
    ModelMismatchError,
    QueueFullError,
    ReplicaLostError,
    ResourceError,
    UnavailableError,
    UnreachableError,
)

R = TypeVar("R")

SHORTEST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0
MOST_DEPARTURES: Final = 5
"""During one call: what ends the worker each time may be the call itself."""

_MEMORY_RETRY_S: Final = 1.0


class Patience:
    """Has calls of one client answered, on its event loop.

    fingerprint: of the model that must answer. seconds: for how long a worker may be away. tell: is told when
    it has gone, and when it is back.
    lost: why nothing is answered any more; None while the worker answers, or is waited for.
    """

    def __init__(
        self, client: AsyncWorkerClient, fingerprint: str, seconds: float, tell: Callable[[str], None]
    ) -> None:
        self._client = client
        self._fingerprint = fingerprint
        self._seconds = seconds
        self._tell = tell
        self._away_since: float | None = None
        self._return: asyncio.Task[None] | None = None
        self.lost: LlorchError | None = None

    async def answer(self, send: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Return the answer of a call, which is sent again as often as the worker goes away before.

        Raises what the call raises where waiting does not help, and :attr:`lost` where nothing does.
        """
        pause, departures = SHORTEST_PAUSE_S, 0
        while True:
            if self.lost is not None:
                raise self.lost
            try:
                answer = await send()
            except ReplicaLostError:
                raise  # others are there
            except (UnavailableError, UnreachableError) as error:
                departures += 1
                if departures > MOST_DEPARTURES:
                    raise
                await self._worker_back(error)
            except InvalidRequestError as error:
                if not _is_taken(error):
                    raise
            except (AuthenticationError, ModelMismatchError) as error:
                self.lost = error
                raise
            except ResourceError as error:
                raise QueueFullError(str(error), retry_after_s=_MEMORY_RETRY_S) from error
            else:
                self._answered()
                return answer
            # Not all at once, and not for ever as fast where it is back by its own word alone.
            await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - it spreads calls
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _answered(self) -> None:
        if self._away_since is not None:
            self._away_since = None
            self._tell(f"the worker at {self._client.address} answers again")

    async def _worker_back(self, error: LlorchError) -> None:
        """Wait until the worker serves again. Raises :attr:`lost` if it does not in time, or serves another
        model.
        """
        if self._away_since is None:
            self._away_since = asyncio.get_running_loop().time()
            self._tell(f"{error}; waiting for up to {self._seconds:g} s")
        if self._return is None or self._return.done():
            self._return = asyncio.create_task(self._wait(self._away_since + self._seconds, error))
        await asyncio.wait((self._return,))  # which leaves it to the others where this call is cancelled
        if self.lost is not None:
            raise self.lost

    async def _wait(self, deadline: float, error: LlorchError) -> None:
        """Wait until the worker serves, and look at what. deadline: by the loop's clock."""
        now = asyncio.get_running_loop().time
        while (left := deadline - now()) > 0:
            try:
                await self._client.wait_until_ready(left)
                self._check((await self._client.model_info()).fingerprint)
            except (UnavailableError, UnreachableError) as away:
                error = away
                await asyncio.sleep(SHORTEST_PAUSE_S)
            except LlorchError as refusal:
                self.lost = refusal
                return
            else:
                return
        self.lost = UnreachableError(f"{error}; it was waited for for {self._seconds:g} s")

    def _check(self, fingerprint: str) -> None:
        """Raise ModelMismatchError unless the model is the same."""
        if fingerprint != self._fingerprint:
            raise ModelMismatchError(
                f"the worker at {self._client.address} serves another model now: its fingerprint was "
                f"{self._fingerprint[:12]} and is {fingerprint[:12]}"
            )


def _is_taken(error: InvalidRequestError) -> bool:
    """Tell whether a request is refused for its id alone: the worker has not noticed yet that the one before
    has left, or another run asks the same.
    """
    return [each.field for each in error.violations] == ["request_id"]
