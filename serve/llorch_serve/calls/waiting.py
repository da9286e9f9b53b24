"""Waiting for the first of several events, as everything that drains or stops does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def first_of(*events: Awaitable[object], timeout_s: float | None = None) -> bool:
    """Wait for the first of several events; tell whether one came before the timeout. Raises what an event
    ended with.
    """
    tasks = [asyncio.ensure_future(event) for event in events]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()  # where this is cancelled too, or they would wait for ever
    for task in done:
        task.result()
    return bool(done)
