"""The scores of one request's continuations: from their prompts' log-probabilities to updates.

The intake makes a :class:`Scores` for each request; nothing is generated for it. Its sequences end with their
prompts, and each gives one update.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llorch_serve.engine.sequence import Limits, Ownership, Sequence, Times, TokenEvent
from llorch_serve.requests import (
    ContinuationScore,
    GenerationUpdate,
    RankRequest,
    ScoreRequest,
    UpdateSink,
)
from llorch_serve.sampling.logprobs import TokenLogprobs, TokenScores, name_tokens
from llorch_serve.sampling.prompt_scores import PromptScores
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.jobs import ended
from llorch_serve.worker.scoring import ScoredPair


@dataclass(slots=True, eq=False)
class Scores:
    """Implements :class:`llorch_serve.worker.jobs.Job`.

    pairs, sequences: one for each continuation.
    logprobs: how many alternatives are listed with each of a continuation's tokens; None: no token is listed.
    """

    request_id: str
    sink: UpdateSink
    pairs: tuple[ScoredPair, ...]
    sequences: tuple[Sequence, ...]
    logprobs: int | None
    tokenizer: Tokenizer
    open: int = field(init=False)
    aborted: bool = field(default=False, init=False)
    _ended: set[int] = field(default_factory=set, init=False)  # indices of sequences

    def __post_init__(self) -> None:
        self.open = len(self.sequences)

    def take(self, event: TokenEvent) -> tuple[list[GenerationUpdate], bool]:
        """Take the one event of a sequence; return its score, or how it ended."""
        if event.sequence not in self.sequences or event.sequence.index in self._ended:
            return [], False
        index, error, score = event.sequence.index, event.error, None
        if error is None:
            try:
                score = self._score(event.sequence)
            except Exception as failure:  # noqa: BLE001 - of the library or memory: told to the caller
                error = failure
        completion = None
        if error is None and event.finish is not None:
            completion = ended(event.sequence, event.finish)
            self._ended.add(index)
        still_open = self.open - (completion is not None)
        self.open = 0 if error is not None else still_open
        update = GenerationUpdate(
            self.request_id,
            "",
            (),
            completion,
            error=error,
            index=index,
            open_answers=still_open,
            score=score,
        )
        return [update], False

    def _score(self, sequence: Sequence) -> ContinuationScore | None:
        """Return how likely a continuation is; None if its sequence was aborted before its end."""
        scores, pair = sequence.prompt_scores, self.pairs[sequence.index]
        if scores is None or not scores.complete:
            return None
        found = scores.found
        return ContinuationScore(
            logprob=sum(place.logprob for place in found),
            is_greedy=all(place.top[0][0] == place.token_id for place in found),
            token_count=len(pair.continuation),
            context_tokens=len(pair.context),
            cached_tokens=sequence.cache.reused,
            logprobs=self._listed(found),
        )

    def _listed(self, found: list[TokenScores]) -> tuple[TokenLogprobs, ...]:
        if self.logprobs is None:
            return ()
        shown = [replace(place, top=place.top[: self.logprobs]) for place in found]
        return tuple(name_tokens(place, self.tokenizer) for place in shown)


def score_sequences(
    request: ScoreRequest | RankRequest,
    pairs: tuple[ScoredPair, ...],
    *,
    ownership: Ownership,
    rows: int | None,
    now: float,
) -> tuple[Sequence, ...]:
    """Return a sequence for each pair, which ends with its prompt.

    rows: see :class:`llorch_serve.sampling.prompt_scores.PromptScores`. now: seconds on the engine's clock.
    """
    listed = request.logprobs if isinstance(request, ScoreRequest) else None
    top = max(1, listed or 0)  # the likeliest one tells whether a token is greedy
    return tuple(
        Sequence(
            request_id=request.request_id,
            token_ids=list(pair.token_ids[:-1]),  # what follows the last token is not asked
            prompt_length=len(pair.token_ids) - 1,
            limits=Limits(max_new_tokens=0),
            index=index,
            ownership=ownership,
            prompt_scores=PromptScores(pair.token_ids, len(pair.context), top, rows),
            times=Times(submitted_at=now),
        )
        for index, pair in enumerate(pairs)
    )
