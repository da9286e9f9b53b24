"""Whether a request to one model can be run, and what it is as token ids. No session is needed for it.

The worker's intake asks before it makes jobs, and the front of a cluster before it sends a request on.
"""

from __future__ import annotations

from dataclasses import dataclass

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.requests import (
    AnswerOptions,
    EncodedPrompt,
    Prompt,
    RankRequest,
    ScoreRequest,
    option_violations,
)
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.structured.spec import HeldForm
from llorch_serve.worker.prompts import PromptEncoder
from llorch_serve.worker.ranking import Ranking
from llorch_serve.worker.scoring import ScoredPair, encode_pairs, place_violations
from llorch_serve.worker.served import ServedModel


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """What a check of a request finds.

    token_ids, text: the prompt; none where it cannot be encoded.
    form: what the answer is held to.
    bad: every bad field.
    """

    token_ids: tuple[int, ...]
    text: str
    form: HeldForm | None
    bad: list[FieldViolation]


class RequestChecks:
    """Checks requests to one model. From any thread.

    context: most tokens of a sequence. most_waiting: sequences that the queue can hold.
    """

    def __init__(
        self, artifact: ServedModel, prompts: PromptEncoder, *, context: int, most_waiting: int
    ) -> None:
        self._manifest = artifact.manifest
        self._prompts = prompts
        self._context = context
        self._most_waiting = most_waiting

    def prompt(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        answers: AnswerOptions,
        encoded: EncodedPrompt | None = None,
    ) -> CheckedPrompt:
        """Return a prompt's token ids, the form of its answer, and every bad field.

        encoded: the prompt's token ids and text, if they are known.
        """
        # An id beyond the tokenizer's is never drawn, so that a bias on it or a stop at it would do nothing.
        known = min(self._manifest.model.vocab_size, self._prompts.tokenizer.vocab_size)
        bad = option_violations(sampling, answers, vocab_size=known)
        if not bad and answers.generated > self._most_waiting:
            field = "n" if answers.best_of is None else "best_of"
            found = (
                f"found {answers.generated}; this worker queues {self._most_waiting}, the most it can take"
            )
            bad.append(FieldViolation(f"sampling.{field}", found))
        context = self._context
        try:
            if encoded is None:
                ids, text = self._prompts.encode(prompt, context=context)
            else:
                ids, text = encoded.token_ids, encoded.text
        except InvalidRequestError as error:
            return CheckedPrompt((), "", None, [*bad, *error.violations])
        bad += self._prompts.violations(ids, context=context)
        form = None
        try:
            form = self._prompts.form(prompt, text, sampling.structured)
        except InvalidRequestError as error:
            bad += error.violations
        if answers.prompt_logprobs is not None and not bad:
            bad += place_violations(len(ids) - 1, answers.prompt_logprobs, "sampling.prompt_logprobs")
        return CheckedPrompt(ids, text, form, bad)

    def continuations(self, request: ScoreRequest) -> tuple[ScoredPair, ...]:
        """Return a pair for each continuation of a request. Raises InvalidRequestError with every bad
        field.
        """
        info = self._manifest
        prefix = info.eos_token_id if info.bos_token_id is None else info.bos_token_id
        pairs = encode_pairs(
            request,
            self._prompts,
            prefix_id=prefix,
            vocab_size=info.model.vocab_size,
            context=self._context,
        )
        if len(pairs) > self._most_waiting:
            found = f"found {len(pairs)}; this worker queues {self._most_waiting}, the most it can take"
            raise InvalidRequestError([FieldViolation("continuations", found)])
        return pairs

    def documents(self, request: RankRequest, ranking: Ranking) -> tuple[ScoredPair, ...]:
        """Return two pairs for each document of a request. Raises InvalidRequestError with every bad
        field.
        """
        pairs = ranking.pairs(request, context=self._context)
        if len(pairs) > self._most_waiting:
            found = (
                f"found {len(pairs) // 2}; this worker queues {self._most_waiting // 2}, the most it can take"
            )
            raise InvalidRequestError([FieldViolation("documents", found)])
        return pairs
