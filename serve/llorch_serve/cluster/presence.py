"""Whether replicas of a model are there, and how busy they are: looked at again and again.

Input: what the replicas say. Output: their totals, for ``GetLoad`` and /metrics; word to the front's health
when none is there any more, and when one is again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from llorch_serve.cluster.interfaces import ReplicaLoad, Replicas
from llorch_serve.cluster.totals import Tally, Totals

LOAD_INTERVAL_S: Final = 1.0  # between two looks
LOOKED_AT: Final = 50  # replicas in an interval; of more each is asked more seldom, or asking takes a core
ABSENT_S: Final = 2.0
"""After which a front without a replica says that it does not serve."""

FORGOTTEN_S: Final = 120.0
"""After which a replica that says nothing counts as gone: Ray has replaced it by then."""

WAIT_S: Final = 30.0
"""After which requests that wait for one end: a replica that is replaced is back long before."""

logger = logging.getLogger(__name__)


class Presence:
    """Used on the replicas' loop, but for the totals and ``silent``, and for :meth:`when_answerable`.

    fingerprint: of the model. give_up: called again and again while none is there for WAIT_S and longer.
    others: fingerprints of other models that the deployment had replicas of at the last look, as while it is
        updated: a front that is about to open one of these lets requests wait.
    silent: the replicas that said nothing then while others did: those that stand still, or have gone.
    """

    def __init__(
        self, replicas: Replicas, fingerprint: str, give_up: Callable[[], None], interval_s: float
    ) -> None:
        self._replicas = replicas
        self._give_up = give_up
        self._interval_s = interval_s
        self._fingerprint = fingerprint
        self._tally = Tally(fingerprint)
        self._loads: Sequence[ReplicaLoad] = ()  # as of the last look
        self._answerable = True
        self._listeners: list[Callable[[bool], None]] = []
        self._heard: dict[str, float] = {}  # when each replica last said how busy it is
        self.others: frozenset[str] = frozenset()
        self.silent: frozenset[str] = frozenset()

    @property
    def totals(self) -> Totals:
        """What the replicas were at the last look at them."""
        return self._tally.totals

    @property
    def tally(self) -> Tally:
        """What sums their figures."""
        return self._tally

    def count_by(self, tally: Tally) -> None:
        """Have another tally of the same model sum them, with what that has counted already. Any thread."""
        self._tally = tally
        tally.look(self._loads)

    def when_answerable(self, tell: Callable[[bool], None]) -> None:
        """Have ``tell`` called, on the loop, whenever the last replica has gone or a first one has come."""
        self._listeners.append(tell)

    def retire(self) -> None:
        """Tell nobody any more: the front serves another model. On the loop."""
        self._listeners = []

    async def look(self) -> None:
        """Look once."""
        try:
            loads = await self._replicas.loads()
            self._loads = loads
            self._tally.look(loads)
        except Exception:  # shown as it was until the next look
            logger.exception("the replicas did not say how busy they are")
            return
        self.others = frozenset(each.fingerprint for each in loads) - {self._fingerprint}
        now = asyncio.get_running_loop().time()
        self._heard |= dict.fromkeys((each.replica for each in loads), now)
        self._heard = {name: at for name, at in self._heard.items() if now - at < FORGOTTEN_S}
        silent = self._heard.keys() - {each.replica for each in loads}
        self.silent = frozenset(silent) if loads else frozenset()

    async def watch(self) -> None:
        """Look until cancelled."""
        now = asyncio.get_running_loop().time
        seen_s = now()
        while True:
            await self.look()
            if self.totals.replicas:
                seen_s = now()
            absent_s = now() - seen_s
            self._tell(absent_s < (WAIT_S if self.others else ABSENT_S))
            if absent_s >= WAIT_S:
                self._give_up()
            asked = max(1.0, len(self.totals.replicas) / LOOKED_AT)
            await asyncio.sleep(self._interval_s * asked)

    def _tell(self, answerable: bool) -> None:
        if answerable == self._answerable:
            return
        self._answerable = answerable
        if not self._listeners:
            return
        logger.warning("a replica is there again" if answerable else "no replica is there")
        for tell in self._listeners:
            tell(answerable)
