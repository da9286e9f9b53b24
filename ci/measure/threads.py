"""Several things at once, each on a thread: what measurements with many clients share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence


def together(work: Sequence[Callable[[], object]]) -> float:
    """Do several things at once; return the seconds that all of them took. Raises what one raised."""
    failed: list[BaseException] = []

    def one(what: Callable[[], object]) -> None:
        try:
            what()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    threads = [threading.Thread(target=one, args=(what,)) for what in work]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return time.perf_counter() - begun
