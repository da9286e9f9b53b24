"""What a running call is given between two looks is joined, kept within its own answer, and never lost."""

from __future__ import annotations

import asyncio

import pytest

from llorch_serve.errors import CancelledError, InvalidRequestError, QueueFullError, UnavailableError
from llorch_serve.requests import Completion, GenerationUpdate, Timings
from llorch_serve.rpc import calls
from llorch_serve.rpc.calls import LiveCall, LiveCalls
from llorch_serve.sequence import FinishReason

DONE = Completion(FinishReason.LENGTH, None, 1, 2, 3, Timings(0, 0, 0))


async def with_call(*, whole: bool) -> tuple[LiveCalls, LiveCall]:
    live = LiveCalls(asyncio.get_running_loop())
    call = LiveCall(whole=whole)
    live.add("a", call)
    return live, call


async def delivered(live: LiveCalls, *updates: GenerationUpdate) -> None:
    live.deliver(list(updates))
    await asyncio.sleep(0)  # one turn of the loop, in which the delivery arrives


def test_updates_that_pile_up_become_one():
    async def scenario():
        live, call = await with_call(whole=False)
        await delivered(live, GenerationUpdate("a", "x", (1,)), GenerationUpdate("other", "no", (9,)))
        await delivered(live, GenerationUpdate("a", "", (2,)))
        await delivered(live, GenerationUpdate("a", "y", (3,)))
        assert await call.take() == [GenerationUpdate("a", "xy", (1, 2, 3))]
        waiting = asyncio.ensure_future(call.take())
        await asyncio.sleep(0)
        await delivered(live, GenerationUpdate("a", "", ()))
        assert not waiting.done()
        await delivered(live, GenerationUpdate("a", "", (), DONE))
        assert await waiting == [GenerationUpdate("a", "", (), DONE)]

    asyncio.run(scenario())


def test_a_message_waits_for_as_many_tokens_as_are_asked_for_but_the_first_and_the_last():
    async def scenario():
        live = LiveCalls(asyncio.get_running_loop())
        live.add("a", call := LiveCall(whole=False, interval=3))
        taken = []

        async def follow():
            while not call.ended:
                taken.append([update.token_ids for update in await call.take()])

        following = asyncio.ensure_future(follow())
        for token in range(1, 8):
            await delivered(live, GenerationUpdate("a", "x", (token,), open_answers=1))
            await asyncio.sleep(0)
        assert taken == [[(1,)], [(2, 3, 4)], [(5, 6, 7)]]
        # Another answer's first token is due at once, and takes along what has come of the other.
        await delivered(live, GenerationUpdate("a", "x", (8,), open_answers=1))
        await delivered(live, GenerationUpdate("a", "y", (1,), index=1, open_answers=1))
        await asyncio.sleep(0)
        assert taken[3:] == [[(8,), (1,)]]
        await delivered(live, GenerationUpdate("a", "x", (9,), DONE, open_answers=1))
        await asyncio.sleep(0)
        assert taken[4:] == [[(9,)]]
        await delivered(live, GenerationUpdate("a", "y", (2,), index=1, open_answers=1))
        await asyncio.sleep(0)
        assert taken[5:] == []
        await delivered(live, GenerationUpdate("a", "", (), DONE, index=1))
        await following
        assert taken[5:] == [[(2,)]]

    asyncio.run(scenario())


def test_a_whole_answer_wakes_its_handler_once():
    async def scenario():
        live, call = await with_call(whole=True)
        waiting = asyncio.ensure_future(call.take())
        await asyncio.sleep(0)
        await delivered(live, GenerationUpdate("a", "x", (1,)))
        await asyncio.sleep(0)
        assert not waiting.done()
        await delivered(live, GenerationUpdate("a", "y", (2,), DONE))
        assert await waiting == [GenerationUpdate("a", "xy", (1, 2), DONE)]

    asyncio.run(scenario())


def test_an_error_ends_a_call_and_a_failure_after_the_end_does_not():
    async def scenario():
        live, call = await with_call(whole=False)
        await delivered(live, GenerationUpdate("a", "", (), error=CancelledError("gone")))
        with pytest.raises(CancelledError, match="gone"):
            await call.take()
        live.add("a", ended := LiveCall(whole=True))
        await delivered(live, GenerationUpdate("a", "", (1,), DONE))
        ended.fail(UnavailableError("late"))
        assert await ended.take() == [GenerationUpdate("a", "", (1,), DONE)]
        live.add("a", failed := LiveCall(whole=True))
        failed.fail(UnavailableError("draining"))
        with pytest.raises(UnavailableError, match="draining"):
            await failed.take()

    asyncio.run(scenario())


def test_an_id_is_taken_until_the_last_update_even_if_its_handler_left():
    async def scenario():
        live, call = await with_call(whole=False)
        call.abandoned = True
        second = LiveCall(whole=False)
        with pytest.raises(InvalidRequestError, match="request_id: 'a' belongs to a live request"):
            live.add("a", second)
        live.discard(second)  # of a call that was never entered
        assert live.find("a", "") is call
        await delivered(live, GenerationUpdate("a", "late", (1,)))
        assert live.find("a", "") is call
        await delivered(live, GenerationUpdate("a", "", (), DONE))
        assert call.ended
        live.add("a", second)
        await delivered(live, GenerationUpdate("a", "new", (5,)))
        assert await second.take() == [GenerationUpdate("a", "new", (5,))]
        live.discard(second)
        assert live.find("a", "") is None

    asyncio.run(scenario())


def test_a_flood_is_turned_away(monkeypatch):
    monkeypatch.setattr(calls, "MAX_LIVE_CALLS", 1)

    async def scenario():
        live, _ = await with_call(whole=False)
        with pytest.raises(QueueFullError) as caught:
            live.add("b", LiveCall(whole=False))
        assert caught.value.retry_after_s == 1.0

    asyncio.run(scenario())
