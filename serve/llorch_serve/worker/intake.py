"""From a request to what the engine runs: checked, tokenised, defaults filled in. Nothing is queued here.

``worker.py`` asks on the caller's thread and hands what comes back to ``live_requests.py``.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace

from llorch_serve.config import CacheSharing
from llorch_serve.engine.lookup import PromptLookup
from llorch_serve.engine.sequence import Limits, Ownership, Sequence, Times
from llorch_serve.engine.shared_prompt import SharedPrompt
from llorch_serve.errors import FieldViolation, InvalidRequestError, UnsupportedError
from llorch_serve.requests import (
    AnswerOptions,
    GenerationRequest,
    Prompt,
    RankRequest,
    ScoreRequest,
    UpdateSink,
)
from llorch_serve.sampling.drawable import DrawableIds
from llorch_serve.sampling.params import ResolvedSampling, SamplingParams, resolve
from llorch_serve.sampling.prompt_scores import PromptScores, most_rows
from llorch_serve.sampling.sampler import SamplingRow
from llorch_serve.structured.spec import HeldForm
from llorch_serve.text.tokenizer import TextStream
from llorch_serve.worker.answers import Answer, Answers, answer_seed
from llorch_serve.worker.checks import RequestChecks
from llorch_serve.worker.prompts import PromptEncoder
from llorch_serve.worker.ranking import Ranking
from llorch_serve.worker.scores import Scores, score_sequences
from llorch_serve.worker.served import ServedModel, ServedSession


@dataclass(frozen=True, slots=True)
class _EncodedPrompt:
    """A prompt as token ids, its text, what ends an answer to it, and the form that holds one.

    told: see :class:`llorch_serve.requests.EncodedPrompt`; of no request that begins here.
    """

    token_ids: tuple[int, ...]
    text: str
    limits: Limits
    form: HeldForm | None
    told: tuple[tuple[int, ...] | None, ...] = ()


class Intake:
    """Makes jobs of requests to one model. From any thread.

    lookup: most tokens that are guessed at a time from a sequence's own text; 0: none. guesses: some are, in
    whatever way. most_waiting: sequences that the queue can hold.
    cache_sharing: whose requests share what is cached.
    """

    def __init__(
        self,
        artifact: ServedModel,
        session: ServedSession,
        prompts: PromptEncoder,
        *,
        lookup: int,
        guesses: bool,
        most_waiting: int,
        cache_sharing: CacheSharing,
    ) -> None:
        self._manifest = artifact.manifest
        self._prompts = prompts
        self._tokenizer = prompts.tokenizer
        self._context = session.capacity.context
        self._drawable = DrawableIds.of(
            self._tokenizer.vocab_size,
            self._tokenizer.unused_ids,
            vocab_size=self._manifest.model.vocab_size,
        )
        self._checks = RequestChecks(artifact, prompts, context=self._context, most_waiting=most_waiting)
        self._lookup = lookup
        self._cache_sharing = cache_sharing
        able = session.capabilities
        self._able = able
        # Copying a slot's beginning needs what reusing it needs.
        self._shares_prompts = able.prefix_reuse
        self._goes_on_exactly = able.batch_invariant and not guesses
        self._scored_rows = most_rows(self._manifest.model.vocab_size) if able.chunked_prefill else None

    def generation(self, request: GenerationRequest, sink: UpdateSink) -> Answers:
        """Return the answers to a request.

        Raises InvalidRequestError with every bad field, or UnsupportedError where the graph cannot score a
        prompt.
        """
        checked = self._checks.prompt(request.prompt, request.sampling, request.answers, request.encoded)
        if checked.bad:
            raise InvalidRequestError(checked.bad)
        sampling, asked = request.sampling, request.answers
        if asked.prompt_logprobs is not None:
            self._check_scores_prompts()
        limits = self._limits(sampling, len(checked.token_ids))
        told = () if request.encoded is None else request.encoded.answers
        prompt = _EncodedPrompt(checked.token_ids, checked.text, limits, checked.form, told)
        resolved = resolve(sampling, self._manifest.generation, lambda: secrets.randbits(63))
        shared = SharedPrompt() if asked.generated > 1 and self._shares_prompts and not told else None
        seeds = [answer_seed(resolved.seed, index) for index in range(asked.generated)]
        members = [
            self._answer(request, prompt, replace(resolved, seed=seed), shared, index)
            for index, seed in enumerate(seeds)
        ]
        best = None if asked.best_of is None else asked.n
        return Answers(request.request_id, sink, tuple(members), best, form=prompt.form)

    def _limits(self, sampling: SamplingParams, prompt_tokens: int) -> Limits:
        """Return what ends an answer to a prompt of so many tokens."""
        stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids.update(self._manifest.stop_token_ids)
        room = self._context - prompt_tokens
        wanted = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        return Limits(wanted, frozenset(stop_ids))

    def _answer(
        self,
        request: GenerationRequest,
        prompt: _EncodedPrompt,
        resolved: ResolvedSampling,
        shared: SharedPrompt | None,
        index: int,
    ) -> Answer:
        """Return one of a request's answers, with a sequence of its own."""
        sampling, form = request.sampling, prompt.form
        told = prompt.told[index] if prompt.told else ()
        # Computed as they were the first time where that gives the same bits, else at once with the prompt.
        forced = (told or ()) if self._goes_on_exactly else ()
        known = () if self._goes_on_exactly else (told or ())
        sequence = self._sequence(request, prompt, resolved, index, forced=forced, known=known)
        sequence.shared = shared
        thought = self._prompts.thought(request.prompt, prompt.text, held=form is not None)
        stream = TextStream(
            self._tokenizer,
            sampling.stop,
            keep_special_tokens=sampling.keep_special_tokens,
            kept=self._prompts.kept_tokens(request.prompt),
            thought=None if thought is None else thought.marks,
        )
        answer = Answer(
            sequence,
            stream,
            self._tokenizer,
            resolved.seed,
            opening=prompt.text if request.answers.echo else "",
            tells_logprobs=sampling.logprobs is not None,
            parser=self._prompts.parser(
                request.prompt, prompt.text, key=f"{request.request_id}:{index}", form=form
            ),
        )
        answer.ended = told is None
        answer.skipped = len(forced)
        answer.go_on(known)
        return answer

    def _sequence(
        self,
        request: GenerationRequest,
        prompt: _EncodedPrompt,
        resolved: ResolvedSampling,
        index: int,
        *,
        forced: tuple[int, ...],
        known: tuple[int, ...],
    ) -> Sequence:
        """Return the sequence of an answer. forced, known: its first tokens, which are computed again, or
        with the prompt.
        """
        asked, ids, limits = request.answers, prompt.token_ids, prompt.limits
        # What ranks the answers is the log-probability of their tokens, whether or not it is told.
        ranking = None if asked.best_of is None else 0
        scored = asked.prompt_logprobs if index == 0 and not known else None  # once, with the first answer
        row = SamplingRow.begin(
            resolved, prompt_ids=ids, stop_ids=limits.stop_ids, drawable=self._drawable, told=known
        )
        row.forced = forced
        logprobs = request.sampling.logprobs
        return Sequence(
            request_id=request.request_id,
            token_ids=[*ids, *known],
            prompt_length=len(ids) + len(known),
            limits=replace(limits, max_new_tokens=limits.max_new_tokens - len(known)),
            sampling=row,
            index=index,
            ownership=self._ownership(request),
            lookup=PromptLookup(ids + known, max_draft=self._lookup) if self._lookup else None,
            logprobs=ranking if logprobs is None else logprobs,
            prompt_scores=None if scored is None else PromptScores(ids, 1, scored, self._scored_rows),
            times=Times(submitted_at=time.perf_counter()),
        )

    def score(self, request: ScoreRequest, sink: UpdateSink) -> Scores:
        """Return the scores of a request's continuations, all of them still to be found.

        Raises InvalidRequestError with every bad field, or UnsupportedError where the graph cannot score.
        """
        pairs = self._checks.continuations(request)
        self._check_scores_prompts()
        sequences = score_sequences(
            request,
            pairs,
            ownership=self._ownership(request),
            rows=self._scored_rows,
            now=time.perf_counter(),
        )
        return Scores(request.request_id, sink, pairs, sequences, request.logprobs, self._tokenizer)

    def rank(self, request: RankRequest, ranking: Ranking, sink: UpdateSink) -> Scores:
        """Return the scores of either answer to each document of a request, all of them still to be found.

        Raises as :meth:`score` does.
        """
        pairs = self._checks.documents(request, ranking)
        self._check_scores_prompts()
        sequences = score_sequences(
            request,
            pairs,
            ownership=self._ownership(request),
            rows=self._scored_rows,
            now=time.perf_counter(),
        )
        return Scores(request.request_id, sink, pairs, sequences, None, self._tokenizer)

    def _ownership(self, request: GenerationRequest | ScoreRequest | RankRequest) -> Ownership:
        return Ownership(_client(request), self._cache_salt(request), request.priority)

    def _cache_salt(self, request: GenerationRequest | ScoreRequest | RankRequest) -> str:
        match self._cache_sharing:
            case CacheSharing.CALLER:
                return request.owner
            case CacheSharing.CLIENT:
                return _client(request)
            case CacheSharing.ALL:
                return ""

    def violations(
        self, prompt: Prompt, sampling: SamplingParams, answers: AnswerOptions
    ) -> list[FieldViolation]:
        """Return every bad field of a prompt and its options."""
        return self._checks.prompt(prompt, sampling, answers).bad

    def _check_scores_prompts(self) -> None:
        if not self._able.prompt_logits:
            raise UnsupportedError(
                f"the graph of {self._manifest.model_id} gives logits for the last token of a call only, so "
                f"no "
                "token of a prompt can be scored; leave prompt_logprobs out, or export the model with llorch"
            )


def _client(request: GenerationRequest | ScoreRequest | RankRequest) -> str:
    """Return a client's name among all callers': nobody waits in another's line by taking its
    ``client_id``.
    """
    return f"{request.owner}/{request.client_id}"
