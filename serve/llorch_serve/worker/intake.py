"""From a request to what the engine runs: checked, tokenised, defaults filled in. Nothing is queued here.

``worker.py`` asks on the caller's thread and hands what comes back to ``live_requests.py``.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace

from llorch_serve.config import CacheSharing
from llorch_serve.engine.lookup import PromptLookup
from llorch_serve.engine.sequence import Sequence
from llorch_serve.engine.shared_prompt import SharedPrompt
from llorch_serve.errors import FieldViolation, InvalidRequestError, UnsupportedError
from llorch_serve.requests import GenerationRequest, Prompt, ScoreRequest, UpdateSink
from llorch_serve.sampling.params import ResolvedSampling, SamplingParams, resolve
from llorch_serve.sampling.prompt_scores import PromptScores, most_rows
from llorch_serve.sampling.sampler import SamplingRow
from llorch_serve.text.tokenizer import TextStream
from llorch_serve.worker.answers import Answer, Answers, answer_seed
from llorch_serve.worker.prompts import PromptEncoder
from llorch_serve.worker.scoring import (
    PromptLogprobs,
    ScoredContinuation,
    encode_pairs,
    place_violations,
    score_sequences,
)
from llorch_serve.worker.served import ServedModel, ServedSession


class Intake:
    """Makes answers and sampling states of requests to one model. From any thread.

    lookup: most tokens that are guessed at a time; 0: none. most_waiting: sequences that the queue can hold.
    cache_sharing: whose requests share what is cached.
    """

    def __init__(
        self,
        artifact: ServedModel,
        session: ServedSession,
        prompts: PromptEncoder,
        *,
        lookup: int,
        most_waiting: int,
        cache_sharing: CacheSharing,
    ) -> None:
        self._manifest = artifact.manifest
        self._prompts = prompts
        self._tokenizer = prompts.tokenizer
        self._context = session.capacity.context
        self._lookup = lookup
        self._most_waiting = most_waiting
        self._cache_sharing = cache_sharing
        able = session.capabilities
        self._able = able
        # Copying a slot's beginning needs what reusing it needs.
        self._shares_prompts = able.prefix_reuse
        self._scored_rows = most_rows(self._manifest.model.vocab_size) if able.chunked_prefill else None

    def generation(self, request: GenerationRequest, sink: UpdateSink) -> tuple[Answers, list[SamplingRow]]:
        """Return the answers to a request and a sampling state for each; no states if there is nothing to
        compute.

        Raises InvalidRequestError with every bad field, or UnsupportedError where the graph cannot score a
        prompt.
        """
        ids, prompt_text, bad = self._check(request.prompt, request.sampling)
        if bad:
            raise InvalidRequestError(bad)
        top = request.sampling.prompt_logprobs
        if top is not None:
            self._check_scores_prompts()
        resolved = resolve(request.sampling, self._manifest.generation, lambda: secrets.randbits(63))
        stop_ids = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stop_ids.update(self._manifest.stop_token_ids)
        room = self._context - len(ids)
        wanted = room if request.sampling.max_tokens is None else min(request.sampling.max_tokens, room)
        members, rows = self._begin(request, resolved, ids, stop_ids, wanted)
        for answer in members:
            answer.opening = prompt_text if request.sampling.echo else ""
            key = f"{request.request_id}:{answer.index}"
            answer.parser = self._prompts.parser(request.prompt, prompt_text, key=key)
        if top is not None:
            members[0].sequence.prompt_scores = PromptScores(ids, 1, top, self._scored_rows)
            members[0].report = PromptLogprobs()
        best = None if request.sampling.best_of is None else request.sampling.n
        answers = Answers(request.request_id, sink, members, best)
        return answers, rows if wanted > 0 or top is not None else []

    def _begin(
        self,
        request: GenerationRequest,
        resolved: ResolvedSampling,
        ids: tuple[int, ...],
        stop_ids: set[int],
        most_new: int,
    ) -> tuple[list[Answer], list[SamplingRow]]:
        """Return the answers to a request, each with a sequence of its own, and their sampling states."""
        sampling = request.sampling
        shared = SharedPrompt() if sampling.answers > 1 and self._shares_prompts else None
        # What ranks the answers is the log-probability of their tokens, whether or not it is told.
        ranking = None if sampling.best_of is None else 0
        logprobs = ranking if sampling.logprobs is None else sampling.logprobs
        members, rows = [], []
        for index in range(sampling.answers):
            seed = answer_seed(resolved.seed, index)
            sequence = Sequence(
                request_id=request.request_id,
                token_ids=list(ids),
                prompt_length=len(ids),
                max_new_tokens=most_new,
                stop_ids=frozenset(stop_ids),
                client=_client(request),
                cache_salt=self._cache_salt(request),
                priority=request.priority,
                lookup=PromptLookup(ids, max_draft=self._lookup) if self._lookup else None,
                logprobs=logprobs,
                shared=shared,
                submitted_at=time.perf_counter(),
            )
            text = TextStream(
                self._tokenizer,
                sampling.stop,
                keep_special_tokens=sampling.keep_special_tokens,
                kept=self._prompts.kept_tokens(request.prompt),
            )
            answer = Answer(request.request_id, index, sequence, text, seed)
            answer.tells_logprobs = sampling.logprobs is not None
            members.append(answer)
            rows.append(SamplingRow.begin(replace(resolved, seed=seed), prompt_ids=ids, stop_ids=stop_ids))
        return members, rows

    def score(self, request: ScoreRequest, sink: UpdateSink) -> tuple[Answers, list[SamplingRow]]:
        """Return the continuations of a request as answers that only compute their prompts, and a state for
        each.

        Raises InvalidRequestError with every bad field, or UnsupportedError where the graph cannot score.
        """
        info, context = self._manifest, self._context
        prefix = info.eos_token_id if info.bos_token_id is None else info.bos_token_id
        vocab_size = info.model.vocab_size
        pairs = encode_pairs(request, self._prompts, prefix_id=prefix, vocab_size=vocab_size, context=context)
        if len(pairs) > self._most_waiting:
            found = f"found {len(pairs)}; this worker queues {self._most_waiting}, the most it can take"
            raise InvalidRequestError([FieldViolation("continuations", found)])
        self._check_scores_prompts()
        sequences = score_sequences(
            request,
            pairs,
            client=_client(request),
            cache_salt=self._cache_salt(request),
            rows=self._scored_rows,
            now=time.perf_counter(),
        )
        members = [
            Answer(
                request.request_id,
                index,
                sequence,
                TextStream(self._tokenizer),
                report=ScoredContinuation(pair, request.logprobs),
            )
            for index, (pair, sequence) in enumerate(zip(pairs, sequences, strict=True))
        ]
        unused = resolve(SamplingParams(temperature=0), info.generation, lambda: 0)
        row = SamplingRow.begin(unused, prompt_ids=(), stop_ids=())
        return Answers(request.request_id, sink, members), [row] * len(members)

    def _cache_salt(self, request: GenerationRequest | ScoreRequest) -> str:
        match self._cache_sharing:
            case CacheSharing.CALLER:
                return request.owner
            case CacheSharing.CLIENT:
                return _client(request)
            case CacheSharing.ALL:
                return ""

    def violations(self, prompt: Prompt, sampling: SamplingParams) -> list[FieldViolation]:
        """Return every bad field of a prompt and its sampling settings."""
        return self._check(prompt, sampling)[2]

    def _check(
        self, prompt: Prompt, sampling: SamplingParams
    ) -> tuple[tuple[int, ...], str, list[FieldViolation]]:
        """Return a prompt's token ids, its text, and every bad field."""
        bad = sampling.violations(vocab_size=self._manifest.model.vocab_size)
        if not bad and sampling.answers > self._most_waiting:
            field = "n" if sampling.best_of is None else "best_of"
            found = f"found {sampling.answers}; this worker queues {self._most_waiting}, the most it can take"
            bad.append(FieldViolation(f"sampling.{field}", found))
        context = self._context
        try:
            ids, text = self._prompts.encode(prompt, context=context)
        except InvalidRequestError as error:
            return (), "", [*bad, *error.violations]
        bad += self._prompts.violations(ids, context=context)
        if sampling.prompt_logprobs is not None and not bad:
            bad += place_violations(len(ids) - 1, sampling.prompt_logprobs, "sampling.prompt_logprobs")
        return ids, text, bad

    def _check_scores_prompts(self) -> None:
        if not self._able.prompt_logits:
            raise UnsupportedError(
                f"the graph of {self._manifest.model_id} gives logits for the last token of a call only, so "
                f"no "
                "token of a prompt can be scored; leave prompt_logprobs out, or export the model with llorch"
            )


def _client(request: GenerationRequest | ScoreRequest) -> str:
    """Return a client's name among all callers': nobody waits in another's line by taking its
    ``client_id``.
    """
    return f"{request.owner}/{request.client_id}"
