"""Independent stopwatches for benchmarks: a proxy on the wire, an interceptor in the client, and a watch on
the model's calls.

They share nothing with what they check: times are their own, and the arithmetic is written from the
definitions of docs/bench.md and docs/bench-serving.md, in plain Python.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from llorch_serve.rpc import worker_pb2 as pb


@dataclass(slots=True)
class SeenCall:
    """A stream as it passed. messages: when, with how many tokens. whole: it ended with a completion. end: of
    its last message.
    """

    start: float
    messages: list[tuple[float, int]] = field(default_factory=list)
    whole: bool = False
    end: float = 0.0
    prompt_tokens: int = 0

    def see(self, message: pb.GenerateStreamResponse) -> None:
        self.end = time.perf_counter()
        if message.token_ids:
            self.messages.append((self.end, len(message.token_ids)))
        if message.HasField("completion"):
            self.whole, self.prompt_tokens = True, message.completion.usage.prompt_tokens


class ClientStopwatch(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[misc]  # grpc's class has no type
    """Notes when a client's calls begin and when their messages come, on the client's own event loop."""

    def __init__(self) -> None:
        self.calls: list[SeenCall] = []

    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        seen = SeenCall(time.perf_counter())
        self.calls.append(seen)
        return self._watched(await continuation(details, request), seen)

    @staticmethod
    async def _watched(stream: Any, seen: SeenCall) -> AsyncIterator[pb.GenerateStreamResponse]:
        try:
            async for message in stream:
                seen.see(message)
                yield message
        except grpc.aio.AioRpcError:
            seen.whole, seen.end = False, time.perf_counter()
            raise


class ProxyStopwatch:
    """Passes calls on to a worker and notes when each message of a stream leaves.

    bundle: so many messages are made one. cut: every so-many-th stream is cut after its second message; 0:
        none.
    """

    def __init__(self, target: str, *, bundle: int = 1, cut: int = 0) -> None:
        self.calls: list[SeenCall] = []
        self._bundle = bundle
        self._cut = cut
        self._channel = grpc.insecure_channel(target)
        self._server = grpc.server(ThreadPoolExecutor(32), handlers=[_Handler(self)])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()
        self._channel.close()

    def pass_one(self, method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        return self._channel.unary_unary(method)(request)

    def pass_stream(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        seen = SeenCall(time.perf_counter())
        self.calls.append(seen)
        cuts = bool(self._cut) and len(self.calls) % self._cut == 0
        for message in self._bundled(self._channel.unary_stream(method)(request)):
            seen.see(message)
            yield message.SerializeToString()
            if cuts and len(seen.messages) == 2:
                seen.whole, seen.end = False, time.perf_counter()
                context.abort(grpc.StatusCode.DATA_LOSS, "cut on the way")

    def _bundled(self, stream: Iterator[bytes]) -> Iterator[pb.GenerateStreamResponse]:
        held: pb.GenerateStreamResponse | None = None
        count = 0
        for data in stream:
            message = pb.GenerateStreamResponse.FromString(data)
            if held is not None:
                text = held.text + message.text
                held.MergeFrom(message)
                held.text = text
            else:
                held = message
            count += 1
            if count >= self._bundle or message.HasField("completion"):
                yield held
                held, count = None, 0


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, proxy: ProxyStopwatch) -> None:
        self._proxy = proxy

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method.endswith("/GenerateStream"):
            return grpc.unary_stream_rpc_method_handler(partial(self._proxy.pass_stream, details.method))
        return grpc.unary_unary_rpc_method_handler(partial(self._proxy.pass_one, details.method))


@contextlib.contextmanager
def proxied(target: str, **how: int) -> Iterator[ProxyStopwatch]:
    """Stand between a client and the worker at ``target``."""
    proxy = ProxyStopwatch(target, **how)
    try:
        yield proxy
    finally:
        proxy.close()


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent lie, on the straight line between the two ranks around it."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def serving_figures(calls: Sequence[SeenCall]) -> dict[str, float]:
    """Figures of a run under load, times in milliseconds, from what passed the proxy."""
    ttft, e2e, tpot, itl = [], [], [], []
    generated = prompts = 0
    whole = [call for call in calls if call.whole]
    for call in whole:
        first, last = call.messages[0][0], call.messages[-1][0]
        count = sum(tokens for _, tokens in call.messages)
        generated += count
        prompts += call.prompt_tokens
        ttft.append(first - call.start)
        e2e.append(call.end - call.start)
        tpot.append((last - first) / (count - 1))
        # The rest of the first message's tokens came with its first one; later ones share their message's
        # wait.
        itl.extend(0.0 for _ in range(call.messages[0][1] - 1))
        for (before, _), (at, tokens) in zip(call.messages, call.messages[1:], strict=False):
            itl.extend((at - before) / tokens for _ in range(tokens))
    lasted = max(call.end for call in calls) - min(call.start for call in calls)
    found = {
        "succeeded": len(whole),
        "failed": len(calls) - len(whole),
        "generated_tokens": generated,
        "prompt_tokens": prompts,
        "duration_s": lasted,
        "requests_per_s": len(whole) / lasted,
        "output_tokens_per_s": generated / lasted,
        "total_tokens_per_s": (generated + prompts) / lasted,
    }
    for name, times in (("ttft", ttft), ("e2e", e2e), ("tpot", tpot), ("itl", itl)):
        found[f"{name}_mean_ms"] = sum(times) / len(times) * 1000
        for percent in (50, 90, 99):
            found[f"{name}_p{percent}_ms"] = percentile(times, percent) * 1000
    return found


def good_calls(calls: Sequence[SeenCall], *, ttft_ms: float, e2e_ms: float) -> list[SeenCall]:
    """Whole answers within both limits."""
    return [
        call
        for call in calls
        if call.whole
        and (call.messages[0][0] - call.start) * 1000 <= ttft_ms
        and (call.end - call.start) * 1000 <= e2e_ms
    ]


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of the model. tokens: computed: of a prompt, or one for each running stream."""

    prompt: bool
    start: float
    end: float
    tokens: int


def watch_model(note: Callable[[ModelCall], None]) -> None:
    """Have every call of every session noted in this process, from now on."""
    from llorch_serve.runtime.session import DecoderSession

    def timed(name: str, prompt: bool, count: Callable[..., int]) -> None:
        inner = getattr(DecoderSession, name)

        def call(self: object, *args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = inner(self, *args, **named)
            note(ModelCall(prompt, start, time.perf_counter(), count(*args)))
            return result

        setattr(DecoderSession, name, call)

    timed("prefill", True, lambda _slot, token_ids, *_: len(token_ids))
    timed("decode", False, lambda token_ids, *_: len(token_ids))


def take_run(calls: list[ModelCall], *, prompts: int, answers: int) -> list[ModelCall]:
    """Take the calls of one run off the end of all: so many tokens of prompts, and so many of answers after
    their first ones.
    """
    run: list[ModelCall] = []
    while prompts > 0 or answers > 0:
        call = calls.pop()
        run.insert(0, call)
        if call.prompt:
            prompts -= call.tokens
        else:
            answers -= call.tokens
    assert (prompts, answers) == (0, 0), "the model's calls are not those of the run"
    return run


def offline_figures(
    run: Sequence[ModelCall], *, streams: int, prompt: int, generated: int
) -> dict[str, float]:
    """Speeds of one run of streams that start together, from the model's calls."""
    start, end = run[0].start, run[-1].end
    all_started = max(call.end for call in run if call.prompt)
    later = sum(call.tokens for call in run if not call.prompt and call.end > all_started)
    return {
        "prefill_tokens_per_s": streams * prompt / (all_started - start),
        "decode_tokens_per_s": later / (end - all_started),
        "tokens_per_s": streams * (prompt + generated) / (end - start),
    }
