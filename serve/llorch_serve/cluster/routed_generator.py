"""A generator whose model is elsewhere: requests are checked and tokenised here, and answered by replicas.

Input: requests of the fronts, as a worker gets them. Output: the updates that come of a replica's parts, to
the same sinks. Everything that waits for a replica runs on one event loop of a thread of its own.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from llorch_serve.cluster import wire
from llorch_serve.cluster.failures import MOST_TRIES, AnswerCutError, judge
from llorch_serve.cluster.front_model import RequestReader
from llorch_serve.cluster.interfaces import CallKind, Description, Replicas, RoutingHint
from llorch_serve.cluster.loop_thread import LoopThread
from llorch_serve.cluster.prefix_index import prefix_of
from llorch_serve.cluster.routed_call import RoutedCall
from llorch_serve.cluster.totals import Tally, Totals
from llorch_serve.engine.load import Load
from llorch_serve.errors import (
    EngineStoppedError,
    FieldViolation,
    UnavailableError,
    duplicate_id,
)
from llorch_serve.requests import (
    Abort,
    AnswerOptions,
    EmbedRequest,
    EncodedPrompt,
    GenerationRequest,
    ModelInfo,
    Prompt,
    RankRequest,
    ScoreRequest,
    UpdateSink,
)
from llorch_serve.sampling.params import SamplingParams

LOAD_INTERVAL_S: Final = 1.0  # between two looks at how busy the replicas are
LOOKS_PER_INTERVAL: Final = 50  # replicas that are asked so often; more of them are asked more seldom

logger = logging.getLogger(__name__)


def _draw_seed() -> int:
    return secrets.randbits(63)


class RoutedGenerator:
    """Implements :class:`llorch_serve.calls.interfaces.ClosableGenerator` over replicas.

    reader: checks and encodes. replicas: used on this generator's loop alone, and closed with it.
    description: what a replica says of itself. draw_seed: for requests that have none, so that all that is
        tried of one request draws the same. load_interval_s: between two looks at how busy they are.
        resume_streams: an answer whose replica ends goes on in another, from the tokens that have been told.
    """

    def __init__(
        self,
        reader: RequestReader,
        replicas: Replicas,
        description: Description,
        loop: LoopThread,
        *,
        draw_seed: Callable[[], int] = _draw_seed,
        load_interval_s: float = LOAD_INTERVAL_S,
        resume_streams: bool = False,
    ) -> None:
        self._reader = reader
        self._replicas = replicas
        self._info = description.info
        self._loop = loop
        self._draw_seed = draw_seed
        self._resume_streams = resume_streams
        self._live: dict[str, RoutedCall] = {}  # by the request's id
        self._lock = threading.Lock()
        self._closed = False
        self._tally = Tally(description.info.fingerprint)
        self._totals = self._tally.look(())
        self._load_interval_s = load_interval_s
        self._watching = loop.start(self._watch())

    # What a front calls.

    def submit(self, request: GenerationRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and send a request; return what ends it early.

        Raises InvalidRequestError with every bad field, or UnavailableError.
        """
        request, ids = self._reader.generation(request)
        seed = self._draw_seed() if request.sampling.seed is None else request.sampling.seed
        request = replace(request, sampling=replace(request.sampling, seed=seed))
        raw = wire.write_generation(request)
        hint, answers = self._hint(request, ids), request.answers.n
        go_on = None
        if self._resume_streams and request.encoded is not None:
            go_on = functools.partial(_going_on, request, request.encoded)
        return self._enter(RoutedCall("generate", raw, hint, sink, answers=answers, seed=seed, go_on=go_on))

    def submit_score(self, request: ScoreRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and send a request for scores; see :meth:`submit`."""
        request, ids = self._reader.score(request)
        return self._send("score", request, ids, wire.write_score(request), sink, len(request.continuations))

    def submit_rank(self, request: RankRequest, sink: UpdateSink) -> Abort:
        """Check and send a request for ranks; see :meth:`submit`."""
        request, ids = self._reader.rank(request)
        return self._send("rank", request, ids, wire.write_rank(request), sink, 2 * len(request.documents))

    def submit_embedding(self, request: EmbedRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and send a request for vectors; see :meth:`submit`."""
        request, ids = self._reader.embed(request)
        return self._send("embed", request, ids, wire.write_embed(request), sink, len(request.inputs))

    def violations(
        self, prompt: Prompt, sampling: SamplingParams, answers: AnswerOptions
    ) -> list[FieldViolation]:
        """Return every bad field of a prompt and its options, as :meth:`submit` would name them."""
        return self._reader.violations(prompt, sampling, answers)

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return the token ids of a prompt and the text they stand for. Raises InvalidRequestError."""
        return self._reader.tokenize(prompt)

    def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool) -> str:
        """Return the text of token ids. Raises InvalidRequestError for ids outside the vocabulary."""
        return self._reader.detokenize(token_ids, keep_special_tokens=keep_special_tokens)

    def model_info(self) -> ModelInfo:
        """Describe what is served."""
        return self._info

    def load(self) -> Load:
        """Return how busy the replicas are together, as of the last look at them."""
        return self._totals.load

    def totals(self) -> Totals:
        """Return what the replicas are together and each alone, as of the last look at them."""
        return self._totals

    def when_dead(self, tell: Callable[[EngineStoppedError], None]) -> None:
        """Nothing of this process stops: a replica whose engine does is replaced, and the front goes on."""

    def abort_everywhere(self, request_ids: Sequence[str], owner: str) -> tuple[str, ...]:
        """End a caller's live requests, whatever front they came by; return the ids of those that were live.
        Blocks; not for an event loop.
        """
        return self._loop.run(self._replicas.abort(request_ids, owner))

    def close(self) -> None:
        """End what still runs here; the replicas go on."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._loop.run(self._end())
        self._loop.close()

    # Between the fronts' threads and the loop.

    def _hint(
        self, request: GenerationRequest | ScoreRequest | RankRequest | EmbedRequest, ids: Sequence[int]
    ) -> RoutingHint:
        return RoutingHint(
            request.request_id,
            request.owner,
            # Callers share no prefixes unless replicas are told otherwise.
            prefix=prefix_of(ids, request.owner) if ids else None,
            fingerprint=self._info.fingerprint,
            session=f"{request.owner}/{request.client_id}" if request.client_id else None,
        )

    def _send(
        self,
        kind: CallKind,
        request: ScoreRequest | RankRequest | EmbedRequest,
        ids: Sequence[int],
        raw: bytes,
        sink: UpdateSink,
        answers: int,
    ) -> Abort:
        return self._enter(RoutedCall(kind, raw, self._hint(request, ids), sink, answers=answers))

    def _enter(self, call: RoutedCall) -> Abort:
        """Make a request live and have it begin; return what ends it."""
        with self._lock:
            if self._closed:
                raise UnavailableError("the front is shutting down")
            if call.request_id in self._live:
                raise duplicate_id(call.request_id)
            self._live[call.request_id] = call
            self._loop.call_soon(functools.partial(self._begin, call))
        return functools.partial(self._loop.call_soon, call.cancel)

    # On the loop.

    def _begin(self, call: RoutedCall) -> None:
        if call.unwanted:
            self._finish(call, call.end_cancelled)
            return
        call.task = asyncio.ensure_future(self._answer(call))
        call.task.add_done_callback(functools.partial(self._done, call))

    async def _answer(self, call: RoutedCall) -> None:
        """Pass an answer on to its end, from another replica where one fails."""
        tries = 0
        while True:
            told = call.told
            try:
                await self._pass_on(call)
            except (Exception, asyncio.CancelledError) as error:
                if call.unwanted or call.ended:
                    raise
                failure = judge(error, begun=call.begun)
                tries = tries + 1 if call.told == told else 1
                if not failure.elsewhere or tries > MOST_TRIES or not call.go_elsewhere():
                    raise failure.error from None
            else:
                return

    async def _pass_on(self, call: RoutedCall) -> None:
        """Pass on what one replica answers. Raises the error that its answer ends with, or Ray's."""
        async with aclosing(self._replicas.call(call.kind, call.raw, hint=call.hint)) as parts:
            async for part in parts:
                updates = wire.read_updates(call.request_id, part)
                last = updates[-1]
                if last.error is not None:
                    raise last.error
                if last.is_last:
                    self._finish(call, functools.partial(call.deliver, updates))
                else:
                    call.deliver(updates)
        if not call.ended:
            raise AnswerCutError

    def _done(self, call: RoutedCall, task: asyncio.Task[None]) -> None:
        """End what has not been ended: aborted, or failed."""
        error = None if task.cancelled() else task.exception()
        if call.ended:
            return
        if error is None:
            self._finish(call, call.end_cancelled)
        else:
            assert isinstance(error, Exception)
            self._finish(call, functools.partial(call.fail, error))

    def _finish(self, call: RoutedCall, tell: Callable[[], None]) -> None:
        """Tell the end of a request, whose id may be taken again by then."""
        with self._lock:
            del self._live[call.request_id]
        try:
            tell()
        except Exception:  # the front's own loop may have ended
            call.ended = True
            logger.exception("the end of a request could not be told")

    async def _watch(self) -> None:
        """Look again and again at how busy the replicas are."""
        while True:
            try:
                self._totals = self._tally.look(await self._replicas.loads())
            except Exception:  # shown as it was until the next look
                logger.exception("the replicas did not say how busy they are")
            looked = max(1.0, len(self._totals.replicas) / LOOKS_PER_INTERVAL)
            await asyncio.sleep(self._load_interval_s * looked)

    async def _end(self) -> None:
        self._watching.cancel()
        tasks = [call.task for call in self._live.values() if call.task is not None]
        for call in list(self._live.values()):
            call.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._replicas.close()


def open_routed(
    replicas: Replicas, open_reader: Callable[[Description], RequestReader], **options: Any
) -> RoutedGenerator:
    """Return a generator over replicas once one of them says what it serves.

    open_reader: makes what checks and encodes; called on this thread. options: the generator's.
    """
    loop = LoopThread("llorch-routing")
    try:
        description = loop.run(replicas.describe())
        return RoutedGenerator(open_reader(description), replicas, description, loop, **options)
    except BaseException:
        loop.close()
        raise


def _going_on(
    request: GenerationRequest, encoded: EncodedPrompt, answers: tuple[tuple[int, ...] | None, ...]
) -> bytes:
    return wire.write_generation(replace(request, encoded=replace(encoded, answers=answers)))
