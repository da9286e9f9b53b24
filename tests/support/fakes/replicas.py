"""Replicas in this process: real ones, bytes and all, around workers and fakes that a test holds."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from llorch_serve.calls.front_desk import FrontDesk
from llorch_serve.calls.interfaces import ClosableGenerator
from llorch_serve.cluster import wire
from llorch_serve.cluster.front_model import FrontModel, RequestReader
from llorch_serve.cluster.interfaces import CallKind, Description, ReplicaLoad, RoutingHint
from llorch_serve.cluster.loop_thread import LoopThread
from llorch_serve.cluster.replica import ServedReplica
from llorch_serve.cluster.routed_generator import RoutedGenerator, open_routed
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.requests import (
    AnswerOptions,
    EmbedRequest,
    GenerationRequest,
    GenerationUpdate,
    Prompt,
    RankRequest,
    ScoreRequest,
    TextGenerator,
)
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.worker.loaded import LoadedModel

T = TypeVar("T")


@functools.cache
def _their_loop() -> LoopThread:
    """Return the loop that all replicas run on. It outlives every front, as other processes do."""
    return LoopThread("test-replicas")


class RayActorError(Exception):
    """Named as Ray's own."""


class ActorDiedError(RayActorError):
    """Likewise."""


class DeploymentUnavailableError(Exception):
    """Likewise."""


class BackPressureError(Exception):
    """Likewise."""


class InStep(ServedReplica):
    """A replica whose engine waits for each update to be on its way, so that every one is a part of its
    own.
    """

    def _opened(self) -> FrontDesk:
        fresh, desk = self._desk is None, super()._opened()
        if fresh:
            loop, live = asyncio.get_running_loop(), desk._calls
            here, deliver = threading.current_thread(), live.deliver

            async def turns() -> None:
                for _ in range(8):  # of the loop, until what was delivered has been taken
                    await asyncio.sleep(0)

            def in_step(updates: list[GenerationUpdate]) -> None:
                deliver(updates)
                if threading.current_thread() is not here:
                    asyncio.run_coroutine_threadsafe(turns(), loop).result()

            live.deliver = in_step  # type: ignore[method-assign]
        return desk


class FakeReplicas:
    """Implements :class:`llorch_serve.cluster.interfaces.Replicas`: the first replica that is not to be
    avoided answers.
    """

    def __init__(self, *replicas: ServedReplica) -> None:
        self.replicas = replicas
        self.hints: list[RoutingHint] = []
        self.parts_left: dict[str, int] = {}  # of an answer, after which its replica dies, by its name
        self.death: BaseException = ActorDiedError("the actor 10.0.0.7:4711 died of a secret")

    async def call(self, kind: CallKind, raw: bytes, *, hint: RoutingHint) -> AsyncGenerator[bytes, None]:
        self.hints.append(hint)
        replica = next((each for each in self.replicas if each.name not in hint.avoid), None)
        if replica is None:
            raise DeploymentUnavailableError
        assert hint.on_sent is not None
        assert hint.on_taken is not None
        hint.on_sent(replica.name, replica.describe)
        hint.on_taken(replica.name)
        left = self.parts_left.get(replica.name)
        async with aclosing(_brought_over(replica.call(kind, raw, hint))) as parts:
            while left is None or left > 0:
                part = await anext(parts, None)
                if part is None:
                    return
                yield part
                left = None if left is None else left - 1
        raise self.death

    async def describe(self) -> Description:
        return wire.read_description(await _there(self.replicas[0].describe()))

    async def loads(self) -> Sequence[ReplicaLoad]:
        return [wire.read_load(await _there(replica.load())) for replica in self.replicas]

    async def abort(self, request_ids: Sequence[str], owner: str) -> tuple[str, ...]:
        found = [await _there(replica.abort(request_ids, owner)) for replica in self.replicas]
        return tuple(dict.fromkeys(id_ for each in found for id_ in each))

    async def close(self) -> None:
        pass


async def _there(work: Coroutine[Any, Any, T]) -> T:
    return await asyncio.wrap_future(_their_loop().start(work))


async def _brought_over(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Give on this loop what is made on the replicas'; closing this one closes that one."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()

    def put(item: bytes | BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the front's loop may have ended
            loop.call_soon_threadsafe(queue.put_nowait, item)

    async def pump() -> None:
        try:
            async with aclosing(parts):
                async for part in parts:
                    put(part)
            put(None)
        except BaseException as error:
            put(error)
            raise

    pumping = _their_loop().start(pump())
    try:
        while (item := await queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        pumping.cancel()


class PassingReader:
    """Encodes nothing: the fake generator behind it does."""

    def __init__(self, generator: TextGenerator) -> None:
        self._generator = generator

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        return self._generator.tokenize(prompt)

    def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool) -> str:
        return self._generator.detokenize(token_ids, keep_special_tokens=keep_special_tokens)

    def generation(self, request: GenerationRequest) -> tuple[GenerationRequest, tuple[int, ...]]:
        if bad := self.violations(request.prompt, request.sampling, request.answers):
            raise InvalidRequestError(bad)
        return request, ()

    def score(self, request: ScoreRequest) -> tuple[ScoreRequest, tuple[int, ...]]:
        return request, ()

    def rank(self, request: RankRequest) -> tuple[RankRequest, tuple[int, ...]]:
        return request, ()

    def embed(self, request: EmbedRequest) -> tuple[EmbedRequest, tuple[int, ...]]:
        return request, ()

    def violations(
        self, prompt: Prompt, sampling: SamplingParams, answers: AnswerOptions
    ) -> list[FieldViolation]:
        return self._generator.violations(prompt, sampling, answers)


def reader_of(generator: ClosableGenerator, description: Description) -> RequestReader:
    """Return what a front would have of a generator's model."""
    if isinstance(generator, LoadedModel):
        return FrontModel(generator.artifact, generator._prompts, description)
    return PassingReader(generator)


def replica_of(
    generator: ClosableGenerator, name: str = "first", kind: type[ServedReplica] = ServedReplica
) -> ServedReplica:
    """Return a replica around a generator."""
    return kind(generator, Description(generator.model_info()), name=name, stream_interval=1)


def replicas_of(*generators: ClosableGenerator, kind: type[ServedReplica] = ServedReplica) -> FakeReplicas:
    """Return a replica around each of some generators: r0, r1 and so on."""
    return FakeReplicas(*(replica_of(each, f"r{place}", kind) for place, each in enumerate(generators)))


def routed(
    *generators: ClosableGenerator, replicas: FakeReplicas | None = None, **options: Any
) -> RoutedGenerator:
    """Return a front's generator over a replica around each of some generators."""
    return open_routed(
        replicas or replicas_of(*generators), lambda told: reader_of(generators[0], told), **options
    )
