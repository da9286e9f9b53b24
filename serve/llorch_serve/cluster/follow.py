"""Follows a model that is deployed anew from another artifact: opens it beside the one that a front serves.

Input: what the cluster says is deployed. Output: another model for the front's generator, or the reason why
the front must end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from llorch_serve.cluster.reopening import ReopenableGenerator
from llorch_serve.cluster.routed_generator import RoutedGenerator
from llorch_serve.cluster.settings import ReplicaSettings
from llorch_serve.errors import LlorchError, UnavailableError, WorkerError

MODEL_LOOK_S: Final = 15.0  # the controller of a large cluster has better things to do

Open = Callable[[ReplicaSettings, Callable[[], None]], RoutedGenerator]
"""Opens a model once a replica of it runs. It calls the second argument again and again until then, and ends
with what that raises.
"""

logger = logging.getLogger(__name__)


class _SupersededError(Exception):
    """Something else has been deployed meanwhile."""


class ModelFollower:
    """Used on one thread at a time, but for :meth:`is_urgent`.

    find: what is deployed now; None: nothing of that name. open_model: opens another model.
    tell: told of a model that has been opened, and of one that is waited for. look_s: between two looks while
    a model is waited for.
    """

    def __init__(
        self,
        generator: ReopenableGenerator,
        find: Callable[[], ReplicaSettings | None],
        open_model: Open,
        tell: Callable[[str], None],
        *,
        look_s: float = MODEL_LOOK_S,
    ) -> None:
        self._generator = generator
        self._find = find
        self._open = open_model
        self._tell = tell
        self._look_s = look_s
        self._known: frozenset[str] = frozenset()  # of other models that have been looked at

    def is_urgent(self) -> bool:
        """Tell whether replicas run of a model that is not known yet, or no others do."""
        current = self._generator.current
        others = current.others
        return bool(others - self._known) or (bool(others) and not current.totals().replicas)

    def look(self) -> None:
        """Look what is deployed, and serve that; return once it is so, which takes as long as replicas do to
        start.

        Raises WorkerError for a model that was deleted, or that cannot be opened here.
        """
        seen = self._generator.current.others
        wanted = self._deployed()
        served = self._generator.model_info()
        self._known |= seen | {served.fingerprint}
        if wanted.fingerprint == served.fingerprint:
            return
        self._tell(f"{wanted.model} was deployed anew from {wanted.artifact}; waiting for a replica of it")
        try:
            opened = self._open(wanted, self._checks(wanted))
        except (_SupersededError, UnavailableError):  # or the front ends
            return
        except (WorkerError, ConnectionError, TimeoutError):  # the latter are the cluster's: looked again
            raise
        except (LlorchError, OSError) as error:
            raise WorkerError(
                f"the model was deployed anew from another artifact, which this front cannot open: {error}"
            ) from error
        info = opened.model_info()
        if bool(info.embedding_size) != bool(served.embedding_size):
            opened.close()
            kinds = ("embeds texts", "generates text")
            now, before = kinds if info.embedding_size else kinds[::-1]
            raise WorkerError(
                f"the model was deployed anew from another artifact, which {now}, where this front's "
                f"{before}; start this front again"
            )
        self._generator.replace(opened)
        self._tell(f"serving {info.model_id} ({info.precision}) of fingerprint {info.fingerprint[:12]} now")

    def _deployed(self) -> ReplicaSettings:
        found = self._find()
        if found is None:
            raise WorkerError("the model was deleted; deploy it, and start this front again")
        return found

    def _checks(self, wanted: ReplicaSettings) -> Callable[[], None]:
        """Return what ends a wait for a model that is wanted no longer."""
        looked = time.monotonic()

        def check() -> None:
            nonlocal looked
            if self._generator.is_closed:
                raise UnavailableError("the front is shutting down")
            if time.monotonic() - looked < self._look_s:
                return
            try:
                if self._deployed().fingerprint != wanted.fingerprint:
                    raise _SupersededError
            except (_SupersededError, WorkerError):
                raise
            except Exception as error:  # noqa: BLE001 - a controller may be on its way to another node
                logger.warning("it is not known whether the model is still wanted: %s", type(error).__name__)
            looked = time.monotonic()

        return check
