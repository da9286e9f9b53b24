"""Clients that ask a worker again and again, each on a connection of its own and one request at a time.

    ci/measurement soak_clients ADDRESS CLIENTS REQUESTS VOCABULARY LONGEST_PROMPT LONGEST_ANSWER

A process of its own, so that its work is not part of anybody's times. Ends after REQUESTS answers, or with 0
when stdin is closed; what runs then is finished first. Prints a :class:`Seen` as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc
import msgspec

from llorch_serve.errors import QueueFullError
from llorch_serve.requests import GenerationRequest, TokenPrompt
from llorch_serve.rpc import convert, worker_pb2_grpc
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.status import read_status
from llorch_serve.sampling.params import SamplingParams

CYCLE = 64
"""So many requests have every length once; the next ones have the same lengths in the same order, and other
tokens.
"""


@dataclass(frozen=True, slots=True)
class Work:
    """Of what size requests are. vocabulary: ids that prompts hold. Lengths in tokens, drawn from an eighth
    of the longest on.
    """

    vocabulary: int
    longest_prompt: int
    longest_answer: int

    def request(self, index: int) -> GenerationRequest:
        """Return request ``index``: lengths log-uniform over a cycle, every other one greedy, prompts like no
        other's.
        """
        place = index % CYCLE
        return self._sized(
            index, _between(self.longest_prompt, place), _between(self.longest_answer, 37 * place % CYCLE)
        )

    def longest(self, index: int) -> GenerationRequest:
        """Return a request as long as any."""
        return self._sized(index, self.longest_prompt, self.longest_answer)

    def _sized(self, index: int, length: int, wanted: int) -> GenerationRequest:
        prompt = tuple(random.Random(index).choices(range(self.vocabulary), k=length))
        sampling = SamplingParams(
            temperature=0.7 * (index % 2), seed=index, max_tokens=wanted, ignore_eos=True
        )
        return GenerationRequest(f"request-{index}", TokenPrompt(prompt), sampling)


def _between(longest: int, place: int) -> int:
    return max(1, round(longest * 8 ** ((place + 1) / CYCLE - 1)))


@dataclass(slots=True)
class Seen:
    """What the clients saw.

    begun: when the first asked, on the machine's monotonic clock. tokens: that arrived in each second from
        there.
    answers: that came whole. refused: RESOURCE_EXHAUSTED, each asked again later. failures: everything else,
        by its words.
    """

    begun: float
    tokens: list[int] = field(default_factory=list)
    answers: int = 0
    refused: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    def arrived(self, tokens: int) -> None:
        """Count tokens that have just come."""
        second = int(time.monotonic() - self.begun)
        self.tokens += [0] * (second + 1 - len(self.tokens))
        self.tokens[second] += tokens

    def rate(self, since: float, until: float) -> float:
        """Return tokens per second between two moments of the monotonic clock, in whole seconds."""
        first, last = round(since - self.begun), round(until - self.begun)
        return sum(self.tokens[first:last]) / (last - first)


async def ask(address: str, clients: int, requests: int | None, work: Work, stopped: asyncio.Event) -> Seen:
    """Run all clients until so many requests have been answered, or ``stopped``."""
    seen, failures, indices = Seen(time.monotonic()), Counter[str](), itertools.count()

    async def answer(stub: Any, message: pb.GenerateStreamRequest) -> None:
        tokens, completed = 0, False
        async for response in stub.GenerateStream(message):
            tokens += len(response.token_ids)
            seen.arrived(len(response.token_ids))
            completed = response.HasField("completion")
        wanted = message.request.sampling.max_tokens
        if completed and tokens == wanted:
            seen.answers += 1
        else:
            failures[f"an answer without its end, or of another length ({tokens} of {wanted})"] += 1

    async def client(number: int) -> None:
        own = (("grpc.use_local_subchannel_pool", 1),)  # else all channels of a process share a connection
        async with grpc.aio.insecure_channel(address, options=own) as channel:
            stub: Any = worker_pb2_grpc.GenerationServiceStub(channel)
            for index in indices:
                if stopped.is_set() or (requests is not None and index >= requests):
                    return
                message = pb.GenerateStreamRequest(
                    request=convert.write_generation_request(work.request(index))
                )
                message.request.client_id = f"client-{number}"
                while not stopped.is_set():
                    try:
                        await answer(stub, message)
                    except grpc.aio.AioRpcError as error:
                        told = read_status(error, address=address)
                        if isinstance(told, QueueFullError):
                            seen.refused += 1
                            await _within(stopped, told.retry_after_s)
                            continue
                        failures[f"{error.code().name}: {error.details()}"] += 1
                    break

    await asyncio.gather(*map(client, range(clients)))
    seen.failures = dict(failures)
    return seen


async def _within(stopped: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stopped.wait(), seconds)


async def main(address: str, clients: int, requests: int, work: Work) -> None:
    """Run as a script says."""
    stopped = asyncio.Event()

    async def until_closed() -> None:
        await asyncio.to_thread(sys.stdin.buffer.read)
        stopped.set()

    if requests:
        seen = await ask(address, clients, requests, work, stopped)
    else:
        seen, _ = await asyncio.gather(ask(address, clients, None, work, stopped), until_closed())
    sys.stdout.buffer.write(msgspec.json.encode(seen))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Work(*map(int, sys.argv[4:7]))))
