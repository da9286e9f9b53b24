"""Health, places and messages without a network: who waits for whom, and who gives way."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from llorch_serve.errors import InvalidRequestError, QueueFullError
from llorch_serve.rpc import connections, health, receiving, sending
from llorch_serve.rpc.call_limit import CallLimit, until
from llorch_serve.rpc.connections import Connections
from llorch_serve.rpc.health import Health
from llorch_serve.rpc.receiving import Receiving, SmallReceiving
from llorch_serve.rpc.sending import Sending

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
ASKED = HealthCheckRequest(service="s").SerializeToString()
TURNS = 20  # of the loop, in which all that needs no event has happened


class Call:
    """A call's context. taken: whether the client takes what it is sent. message: None: it sends none yet."""

    def __init__(
        self, message: bytes | None = ASKED, *, peer: str = "ipv4:1.1.1.1:1", taken: bool = True
    ) -> None:
        self._peer, self.told, self.status, self.read_calls = peer, [], None, 0
        self._message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._taken = asyncio.Event()
        if message is not None:
            self.send(message)
        if taken:
            self._taken.set()

    def peer(self) -> str:
        return self._peer

    def send(self, message: Any) -> None:
        self._message.set_result(message)

    async def read(self) -> Any:
        self.read_calls += 1
        return await asyncio.shield(self._message)

    async def write(self, response: Any) -> None:
        await self._taken.wait()
        self.told.append(response.status)

    async def abort(self, code: Any, details: str = "", trailers: Any = ()) -> None:
        self.status = code, details
        raise grpc.aio.AbortError


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Served:
    """Health of the service "s", and its calls as tasks."""

    def __init__(self) -> None:
        self.health = Health(("s",), Sending())
        self._handlers = self.health.method_handlers()

    def call(self, method: str, context: Call) -> asyncio.Future[None]:
        return asyncio.ensure_future(self._handlers[method].stream_stream(None, context))


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_status_is_set_without_waiting_for_anybody_and_watchers_that_take_it_hear_it() -> None:
    async def test() -> None:
        served = Served()
        stuck, good = Call(taken=False), Call(peer="ipv4:1.1.1.1:2")
        calls = [served.call("Watch", stuck), served.call("Watch", good)]
        await turns()
        served.health.serve()
        await turns()
        served.health.end()
        served.health.serve()  # too late
        await turns()
        assert (stuck.told, good.told) == ([], [NOT_SERVING, SERVING, NOT_SERVING])
        assert not any(call.done() for call in calls)

    run(test)


def test_a_watcher_that_leaves_takes_nothing_from_the_others() -> None:
    async def test() -> None:
        served, leaving, staying = Served(), Call(), Call()
        call = served.call("Watch", leaving)
        served.call("Watch", staying)
        await turns()
        call.cancel()
        served.health.serve()
        await turns()
        served.health.end()
        await turns()
        assert (leaving.told, staying.told) == ([NOT_SERVING], [NOT_SERVING, SERVING, NOT_SERVING])

    run(test)


def test_a_service_that_is_not_known() -> None:
    async def test() -> None:
        served, check, watch = Served(), Call(b"\n\x01x"), Call(b"\n\x01x")
        served.call("Check", check)
        served.call("Watch", watch)
        await turns()
        served.health.serve()
        await turns()
        assert check.status == (grpc.StatusCode.NOT_FOUND, "")
        assert watch.told == [HealthCheckResponse.SERVICE_UNKNOWN]

    run(test)


def test_a_message_that_is_none_is_the_callers_fault() -> None:
    async def test() -> None:
        served, bad, none = Served(), Call(b"\xff"), Call(grpc.aio.EOF)
        served.call("Check", bad)
        served.call("Check", none)
        await turns()
        for call, said in ((bad, "not a valid HealthCheckRequest"), (none, "none came")):
            assert call.status is not None
            assert call.status[0] is grpc.StatusCode.INVALID_ARGUMENT
            assert said in call.status[1]

    run(test)


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_whoever_takes_nothing_is_cut(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[str] = []
    monkeypatch.setattr(sending, "LIMIT_S", 0.0)
    monkeypatch.setattr(Connections, "cut", lambda _self, peer: cut.append(peer))

    async def test() -> None:
        call = Served().call(method, Call(taken=False, peer="ipv4:9.9.9.9:9"))
        await asyncio.wait([call])
        assert call.cancelled()

    run(test)
    assert cut == ["ipv4:9.9.9.9:9"]


def test_a_connection_that_holds_most_watches_is_refused_more_and_drives_out_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "MAX_WATCHERS", 3)

    async def test() -> None:
        served, honest = Served(), Call()
        served.call("Watch", honest)
        greedy = [Call(peer="ipv4:1.1.1.1:2") for _ in range(9)]
        for context in greedy:
            served.call("Watch", context)
            await turns()
        served.health.serve()
        await turns()
        assert honest.told == [NOT_SERVING, SERVING]
        assert [context.told[-1:] for context in greedy] == [[SERVING]] * 2 + [[]] * 7
        ended = [context.status for context in greedy if context.status is not None]
        assert {code for code, _ in ended} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(ended) == 7

    run(test)


def test_a_connection_that_is_many_peoples_gives_its_oldest_watch_up_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "MAX_WATCHERS", 4)
    proxy, other = "ipv4:1.1.1.1:2", "ipv4:1.1.1.1:1"

    async def test() -> None:
        served, now, loop = Served(), 0.0, asyncio.get_running_loop()
        loop.time, real = (lambda: real() + now), loop.time  # type: ignore[method-assign]
        others, idle = ([Call(peer=peer) for _ in range(2)] for peer in (other, proxy))
        early, late, last = (Call(peer=proxy) for _ in range(3))
        for context in (*others, *idle, early):
            served.call("Watch", context)
            await turns()
        now += health.KEPT_S
        for context in (late, last):
            served.call("Watch", context)
            await turns()
        served.call("Watch", next_ := Call(peer=proxy))
        await turns()
        assert [context.status is not None for context in (*others, *idle)] == [False, False, True, True]
        assert [context.told for context in (early, late, last, next_)] == [
            [],
            [NOT_SERVING],
            [NOT_SERVING],
            [],
        ]

    run(test)


def test_a_newcomer_gets_in_where_one_connection_holds_all_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_WATCHERS", 3)

    async def test() -> None:
        served, honest = Served(), Call(peer="ipv4:2.2.2.2:2")
        greedy = [Call() for _ in range(3)]
        for context in (*greedy, honest):
            served.call("Watch", context)
            await turns()
        assert honest.told == [NOT_SERVING]
        assert [context.status is not None for context in greedy] == [True, False, False]

    run(test)


def test_a_newcomer_gets_in_where_many_connections_hold_a_place_each() -> None:
    async def test() -> None:
        limit = CallLimit(2)
        with limit.hold(Call(peer="a")) as oldest, limit.hold(Call(peer="b")) as next_:  # type: ignore[arg-type]
            with limit.hold(Call(peer="c")) as newest:  # type: ignore[arg-type]
                assert [call.evicted.done() for call in (oldest, next_, newest)] == [True, False, False]
            with limit.hold(Call(peer="d")):  # type: ignore[arg-type]
                assert not next_.evicted.done()

    run(test)


def test_checks_that_dribble_give_way_to_one_that_comes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MESSAGE_S", 0.0)

    async def test() -> None:
        served = Served()
        slow = [Call(None, peer=f"ipv4:1.1.1.1:{port}") for port in range(4)]
        for context in slow:
            served.call("Check", context)
        await turns()
        honest = Call(peer="ipv4:2.2.2.2:2")
        served.call("Check", honest)
        await turns()
        assert honest.told == [NOT_SERVING]
        assert all(context.told == [NOT_SERVING] for context in slow)  # as if they had named no service

    run(test)


@pytest.mark.parametrize("method", ["Check", "Watch"])
@pytest.mark.parametrize("given_up", [False, True])
def test_after_a_large_check_none_is_received_for_a_while(
    method: str, given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "MESSAGE_S", 0.0 if given_up else 1000.0)
    large = bytes(receiving.SMALL_BYTES + 1)

    async def test() -> None:
        served, now, loop = Served(), 0.0, asyncio.get_running_loop()
        first = Call(None)
        served.call("Check", first)
        await turns()
        served.call("Check", waiting := Call(b"\n\x01x"))
        if given_up:
            await turns()
            assert (first.told, waiting.status) == ([NOT_SERVING], (grpc.StatusCode.NOT_FOUND, ""))
            first.send(large)
            await turns()
        else:
            first.send(large)
            await turns()
            assert first.status is not None
            assert f"found a message of {len(large)} bytes" in first.status[1]
            assert (waiting.told, waiting.read_calls) == ([NOT_SERVING], 0)
        loop.time, real = (lambda: real() + now), loop.time  # type: ignore[method-assign]
        served.call(method, later := Call(b"\n\x01x"))
        await turns()
        assert (later.told, later.read_calls) == ([NOT_SERVING], 0)
        now += health.DISTRUST_S
        served.call("Check", trusted := Call(b"\n\x01x"))
        await turns()
        assert trusted.status == (grpc.StatusCode.NOT_FOUND, "")

    run(test)


def test_a_large_message_of_ids_to_abort_costs_no_other_caller_its_call() -> None:
    async def test() -> None:
        messages = SmallReceiving(1.0)
        with pytest.raises(InvalidRequestError):
            await messages.message(Call(bytes(receiving.SMALL_BYTES + 1)))  # type: ignore[arg-type]
        assert await messages.message(Call(b"ids")) == b"ids"  # type: ignore[arg-type]

    run(test)


def test_one_check_is_received_at_a_time_and_the_latest_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MAX_SMALL_WAITING", 2)

    async def test() -> None:
        messages = SmallReceiving(1000.0)
        contexts = [Call(None) for _ in range(4)]
        calls = [asyncio.ensure_future(messages.message(context)) for context in contexts]  # type: ignore[arg-type]
        await turns()
        assert [context.read_calls for context in contexts] == [1, 0, 0, 0]
        with pytest.raises(QueueFullError, match="other calls wanted its place"):
            await calls[1]  # of those that wait, the one that came first
        contexts[0].send(b"0")
        await turns()
        assert [context.read_calls for context in contexts] == [1, 0, 0, 1]
        contexts[3].send(b"3")
        await turns()
        contexts[2].send(b"2")
        assert [await calls[index] for index in (0, 2, 3)] == [b"0", b"2", b"3"]

    run(test)


def test_a_connection_with_many_checks_neither_evicts_another_nor_goes_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiving, "MAX_SMALL_WAITING", 4)

    async def test() -> None:
        messages = SmallReceiving(1000.0)
        contexts = [Call(None), Call(None, peer="ipv4:2.2.2.2:2"), *(Call(None) for _ in range(8))]
        calls = [asyncio.ensure_future(messages.message(context)) for context in contexts]  # type: ignore[arg-type]
        await turns()
        assert [call.done() for call in calls] == [False, False, *[True] * 5, *[False] * 3]
        for index in (0, 1, 9):
            contexts[index].send(b"m")
            await turns()
            assert calls[index].done()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    run(test)


def test_a_call_that_leaves_as_another_takes_its_place_harms_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MAX_SMALL_WAITING", 1)

    async def test() -> None:
        messages = SmallReceiving(1000.0)
        contexts = [Call(None) for _ in range(3)]
        calls = [asyncio.ensure_future(messages.message(context)) for context in contexts[:2]]  # type: ignore[arg-type]
        await turns()
        calls.append(asyncio.ensure_future(messages.message(contexts[2])))  # type: ignore[arg-type]
        calls[1].cancel()  # heard of after the third call has come
        await turns()
        for context in (contexts[0], contexts[2]):
            context.send(b"m")
        assert await asyncio.gather(calls[0], calls[2]) == [b"m", b"m"]
        assert calls[1].cancelled()

    run(test)


@pytest.mark.parametrize("turn", range(12))
def test_a_place_is_given_on_whenever_who_has_it_or_waits_for_it_leaves(turn: int) -> None:
    async def test() -> None:
        messages = SmallReceiving(1000.0)
        contexts = [Call(None) for _ in range(3)]
        calls = [asyncio.ensure_future(messages.message(context)) for context in contexts]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        contexts[0].send(b"0")
        for _ in range(turn):
            await asyncio.sleep(0)
        calls[2].cancel()
        await turns()
        contexts[1].send(b"1")
        assert await calls[1] == b"1"
        assert await messages.message(Call(b"next")) == b"next"  # type: ignore[arg-type]
        await asyncio.wait(calls)
        assert calls[2].cancelled()

    run(test)


def test_a_read_that_is_given_up_is_left_to_end_by_itself() -> None:
    async def test() -> None:
        context = Call(None)
        read = await until(context.read(), limit_s=0)
        assert not read.done()
        context.send(b"late")
        assert await read == b"late"

    run(test)


def test_a_loop_that_was_held_up_does_not_blame_the_client() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        loop.time = lambda: now  # type: ignore[method-assign]
        context = Call(None)

        def hold_up() -> None:
            nonlocal now
            now += 1000.0
            loop.call_soon(
                loop.call_soon, context.send, b"there"
            )  # what gRPC has to say is heard after the clock has moved

        loop.call_soon(hold_up)
        assert (await until(context.read(), limit_s=10.0)).done()

    asyncio.run(test())  # with no time of its own, since this one's loop has a clock that jumps


@pytest.mark.parametrize("small", [False, True])
def test_a_message_must_arrive_in_time(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GUARANTEED_S", "LIMIT_S", "SMALL_LIMIT_S"):
        monkeypatch.setattr(receiving, name, 0.0)

    async def test() -> None:
        messages = SmallReceiving(0.0) if small else Receiving(10)
        with pytest.raises(InvalidRequestError, match="request: its message had not arrived whole after 0 s"):
            await messages.message(Call(None))  # type: ignore[arg-type]

    run(test)


def test_a_large_message_where_a_small_one_is_expected_is_refused() -> None:
    async def test() -> None:
        messages = SmallReceiving(1.0)
        fits = bytes(receiving.SMALL_BYTES)
        assert await messages.message(Call(fits)) == fits  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match=f"{len(fits) + 1} bytes, expected at most {len(fits)}"):
            await messages.message(Call(fits + b"a"))  # type: ignore[arg-type]

    run(test)


def test_messages_being_received_are_bounded_and_the_others_wait_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiving, "RECEIVING_BYTES", 25)
    monkeypatch.setattr(receiving, "MAX_EXPECTED", 2)

    async def test() -> None:
        messages = Receiving(10)
        contexts = [Call(None) for _ in range(5)]
        calls = [asyncio.ensure_future(messages.message(context)) for context in contexts]  # type: ignore[arg-type]
        await turns()
        assert [context.read_calls for context in contexts] == [1, 1, 0, 0, 0]
        with pytest.raises(QueueFullError, match="2 requests wait for their messages to be received"):
            await calls[4]
        for context in contexts[:4]:
            context.send(b"m")
        assert [await call for call in calls[:4]] == [b"m"] * 4

    run(test)


def test_whoever_dribbles_gives_way_as_soon_as_another_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "RECEIVING_BYTES", 10)
    monkeypatch.setattr(receiving, "GUARANTEED_S", 0.0)

    async def test() -> None:
        messages, slow, honest = Receiving(10), Call(None), Call()
        first = asyncio.ensure_future(messages.message(slow))  # type: ignore[arg-type]
        while not messages._slow:
            await asyncio.sleep(0)
        assert await messages.message(honest) == ASKED  # type: ignore[arg-type]
        with pytest.raises(QueueFullError, match="others wait to send theirs"):
            await first

    run(test)


@pytest.mark.parametrize(
    ("listening", "host", "shown"),
    [
        ("127.0.0.1", "127.0.0.1", "ipv4:127.0.0.1:{}"),
        ("::1", "::1", "ipv6:%5B::1%5D:{}"),
        ("::", "127.0.0.1", "ipv4:127.0.0.1:{}"),
    ],
)
def test_the_connection_with_a_peer_is_cut_and_no_other(
    listening: str, host: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PAUSE_S", 0.0)
    both = listening == "::"
    family = socket.AF_INET6 if ":" in listening else socket.AF_INET
    with socket.create_server((listening, 0), family=family, dualstack_ipv6=both) as server:
        pairs = []
        for _ in range(2):
            client = socket.create_connection((host, server.getsockname()[1]), 60)
            pairs.append((client, server.accept()[0]))

        async def test() -> None:
            found = Connections()
            found.cut("unknown")  # of a connection that is gone, gRPC knows no address
            found.cut(shown.format(pairs[0][0].getsockname()[1]))
            assert await asyncio.to_thread(pairs[0][0].recv, 1) == b""

        run(test)
        pairs[1][1].sendall(b"x")
        assert pairs[1][0].recv(1) == b"x"
        for pair in pairs:
            for end in pair:
                end.close()
