"""A generator whose model is elsewhere: requests are checked and tokenised here, and answered by replicas.

Input: requests of the fronts, as a worker gets them. Output: calls of replicas, which ``routed_calls.py``
leads to their ends.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

from llorch_serve.cluster import wire_requests
from llorch_serve.cluster.front_model import RequestReader
from llorch_serve.cluster.interfaces import CallKind, Description, Replicas, RoutingHint
from llorch_serve.cluster.loop_thread import LoopThread
from llorch_serve.cluster.prefix_index import prefix_of
from llorch_serve.cluster.presence import LOAD_INTERVAL_S, Presence
from llorch_serve.cluster.routed_call import Again, RoutedCall
from llorch_serve.cluster.routed_calls import RoutedCalls
from llorch_serve.cluster.totals import Tally, Totals
from llorch_serve.config import CacheSharing
from llorch_serve.engine.load import Load
from llorch_serve.errors import (
    EngineStoppedError,
    FieldViolation,
    ModelMismatchError,
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
        self._cache_sharing = description.cache_sharing
        self._loop = loop
        self._draw_seed = draw_seed
        self._resume_streams = resume_streams
        self._told: tuple[Totals, ModelInfo] | None = None  # what is served, as of these totals
        self._calls = RoutedCalls(replicas, loop)
        self._presence = Presence(
            replicas, self._info.fingerprint, self._calls.give_up_waiting, load_interval_s
        )
        loop.run(self._presence.look())
        self._watching = loop.start(self._presence.watch())

    # What a front calls.

    def submit(self, request: GenerationRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and send a request; return what ends it early.

        Raises InvalidRequestError with every bad field, or UnavailableError.
        """
        self._check_pin(request)
        asked = request
        request, ids = self._reader.generation(request)
        seed = self._draw_seed() if request.sampling.seed is None else request.sampling.seed
        request = replace(request, sampling=replace(request.sampling, seed=seed))
        raw = wire_requests.write_generation(request)
        hint, answers = self._hint(request, ids), request.answers.n
        go_on = None
        if self._resume_streams and request.encoded is not None:
            go_on = functools.partial(_going_on, request, request.encoded)
        return self._calls.enter(
            RoutedCall(
                "generate",
                raw,
                hint,
                sink,
                answers=answers,
                again=lambda other, same: other.submit(asked, same),
                seed=seed,
                prompt_tokens=len(ids),
                go_on=go_on,
            )
        )

    def submit_score(self, request: ScoreRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and send a request for scores; see :meth:`submit`."""
        self._check_pin(request)
        read, ids = self._reader.score(request)
        raw, answers = wire_requests.write_score(read), len(read.continuations)
        return self._send(
            "score", read, ids, raw, sink, answers, lambda other, same: other.submit_score(request, same)
        )

    def submit_rank(self, request: RankRequest, sink: UpdateSink) -> Abort:
        """Check and send a request for ranks; see :meth:`submit`."""
        read, ids = self._reader.rank(request)
        raw, answers = wire_requests.write_rank(read), 2 * len(read.documents)
        return self._send(
            "rank", read, ids, raw, sink, answers, lambda other, same: other.submit_rank(request, same)
        )

    def submit_embedding(self, request: EmbedRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and send a request for vectors; see :meth:`submit`."""
        self._check_pin(request)
        read, ids = self._reader.embed(request)
        raw, answers = wire_requests.write_embed(read), len(read.inputs)
        return self._send(
            "embed", read, ids, raw, sink, answers, lambda other, same: other.submit_embedding(request, same)
        )

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
        """Describe what is served: it can what all replicas can, as of the last look at them."""
        totals, told = self._presence.totals, self._told
        if told is None or told[0] is not totals:  # every request asks, and there may be a thousand replicas
            told = self._told = totals, _described(self._info, totals)
        return told[1]

    def load(self) -> Load:
        """Return how busy the replicas are together, as of the last look at them."""
        return self._presence.totals.load

    def totals(self) -> Totals:
        """Return what the replicas are together and each alone, as of the last look at them."""
        return self._presence.totals

    @property
    def tally(self) -> Tally:
        """What sums the figures of the replicas."""
        return self._presence.tally

    def count_by(self, tally: Tally) -> None:
        """Have another tally of the same model sum them, which goes on from what it has counted."""
        self._presence.count_by(tally)

    def when_dead(self, tell: Callable[[EngineStoppedError], None]) -> None:
        """Nothing of this process stops: a replica whose engine does is replaced, and the front goes on."""

    def when_answerable(self, tell: Callable[[bool], None]) -> None:
        """Have ``tell`` called, on a thread of this generator's, whenever the last replica has gone or a
        first one has come.
        """
        self._loop.call_soon(functools.partial(self._presence.when_answerable, tell))

    def abort_everywhere(self, request_ids: Sequence[str], owner: str) -> tuple[str, ...]:
        """End a caller's live requests, whatever front they came by; return the ids of those that were live.
        Blocks; not for an event loop.
        """
        return self._loop.run(self._replicas.abort(request_ids, owner))

    @property
    def others(self) -> frozenset[str]:
        """Fingerprints of other models that the deployment had replicas of, as of the last look."""
        return self._presence.others

    def is_live(self, request_id: str) -> bool:
        """Return whether a request of that id is live. Any thread."""
        return self._calls.find(request_id) is not None

    def retire(self) -> None:
        """Tell nobody any more whether replicas are there: another generator answers what is new."""
        self._loop.call_soon(self._presence.retire)

    def withdraw(self) -> list[RoutedCall]:
        """Return the requests that no replica has taken, which this generator answers no longer. Blocks."""
        return self._loop.run(self._calls.withdraw())

    def close_if_idle(self) -> bool:
        """Close if no request is live; tell whether that is so. What is submitted then is refused."""
        if not self._calls.shut_if_idle():
            return False
        self._loop.run(self._end())
        self._loop.close()
        return True

    def close(self) -> None:
        """End what still runs here; the replicas go on."""
        if self._calls.shut():
            self._loop.run(self._end())
            self._loop.close()

    def _hint(
        self, request: GenerationRequest | ScoreRequest | RankRequest | EmbedRequest, ids: Sequence[int]
    ) -> RoutingHint:
        return RoutingHint(
            request.request_id,
            request.owner,
            prefix=prefix_of(ids, self._cache_salt(request)) if ids else None,
            fingerprint=self._info.fingerprint,
            session=f"{request.owner}/{request.client_id}" if request.client_id else None,
            avoid=self._presence.silent,
        )

    def _send(
        self,
        kind: CallKind,
        request: ScoreRequest | RankRequest | EmbedRequest,
        ids: Sequence[int],
        raw: bytes,
        sink: UpdateSink,
        answers: int,
        again: Again,
    ) -> Abort:
        call = RoutedCall(kind, raw, self._hint(request, ids), sink, answers=answers, again=again)
        return self._calls.enter(call)

    def _check_pin(self, request: GenerationRequest | ScoreRequest | EmbedRequest) -> None:
        """Raise ModelMismatchError for a request that only another model may answer."""
        served = self._info.fingerprint
        if request.fingerprint not in (None, served):
            raise ModelMismatchError(
                f"fingerprint {request.fingerprint[:200]!r} was asked for, this worker serves {served!r}; "
                "ask for that, leave fingerprint out, or call another worker"
            )

    def _cache_salt(self, request: GenerationRequest | ScoreRequest | RankRequest | EmbedRequest) -> str:
        """Return whose cached prefixes a request shares, as its replica decides it."""
        match self._cache_sharing:
            case CacheSharing.CALLER:
                return request.owner
            case CacheSharing.CLIENT:
                return f"{request.owner}/{request.client_id}"
            case CacheSharing.ALL:
                return ""

    async def _end(self) -> None:
        self._watching.cancel()
        await self._calls.end()
        try:
            await self._replicas.close()
        except Exception:  # the cluster may be gone; what is left of this generator ends all the same
            logger.exception("the replicas could not be let go of")


def open_routed(
    replicas: Replicas,
    open_reader: Callable[[Description], RequestReader],
    *,
    check: Callable[[], None] = lambda: None,
    check_s: float = 0.5,
    **options: Any,
) -> RoutedGenerator:
    """Return a generator over replicas once one of them says what it serves.

    The replicas are closed with it, and where it fails.

    open_reader: makes what checks and encodes; called on this thread. check: called every ``check_s`` seconds
    until then; what it raises ends the wait. options: the generator's.
    """
    loop = LoopThread("llorch-routing")
    try:
        asked = loop.start(replicas.describe())
        while not wait((asked,), check_s).done:
            check()
        description = asked.result()
        return RoutedGenerator(open_reader(description), replicas, description, loop, **options)
    except BaseException:
        try:
            loop.run(replicas.close())
        except Exception:  # what has failed is told, and not this
            logger.exception("the replicas could not be let go of")
        loop.close()
        raise


def _going_on(
    request: GenerationRequest, encoded: EncodedPrompt, answers: tuple[tuple[int, ...] | None, ...]
) -> bytes:
    return wire_requests.write_generation(replace(request, encoded=replace(encoded, answers=answers)))


def _described(info: ModelInfo, totals: Totals) -> ModelInfo:
    able = info.capabilities
    for each in totals.replicas:
        able = tuple(name for name in able if name in each.capabilities)
    return replace(info, capabilities=able)
