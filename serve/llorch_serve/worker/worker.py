"""A loaded artifact that answers requests: text in, text out, around the engine's token ids.

The command line and the gRPC servicer both use it. Requests are checked and tokenised on the caller's thread;
what becomes of them then is in ``live_requests.py``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

from llorch_serve.config import EngineConfig
from llorch_serve.engine.drafter import Drafter, DraftLimits
from llorch_serve.engine.engine import Engine
from llorch_serve.engine.guessing import Guessing
from llorch_serve.engine.load import Load, together
from llorch_serve.engine.payoff import Payoff
from llorch_serve.engine.scheduler import Scheduler, SchedulerConfig
from llorch_serve.engine.sequence import FinishReason, TokenEvent
from llorch_serve.engine.waiting import DEFAULT_MOST_TOKENS
from llorch_serve.errors import FieldViolation, UnsupportedError
from llorch_serve.requests import (
    Abort,
    AnswerOptions,
    EmbedRequest,
    GenerationRequest,
    ModelInfo,
    Prompt,
    RankRequest,
    ScoreRequest,
    TokenPrompt,
    UpdateSink,
)
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.structured.compiler import GrammarCompiler
from llorch_serve.worker.intake import Intake
from llorch_serve.worker.live_requests import LiveRequests
from llorch_serve.worker.loaded import LoadedModel
from llorch_serve.worker.local import run_together
from llorch_serve.worker.prompts import PromptEncoder
from llorch_serve.worker.ranking import choose_ranking
from llorch_serve.worker.served import ServedDraft, ServedModel, ServedPipeline, ServedSession

MOST_DRAFT: Final = 16
"""Most tokens that a draft model guesses at a time; how many it does is decided by what that costs and gives.
"""

_STUCK_S: Final = 30.0
"""After which a stage whose call has not ended is ended, where the worker is to close. No call takes longer
than one with a part of a prompt.
"""


class Worker(LoadedModel):
    """Implements :class:`llorch_serve.requests.TextGenerator` on an artifact. ``loading/worker.py`` makes one
    of a folder.

    pipeline: of a model that is cut into stages, whose first lane is ``session``; None: it is one graph.
    draft: guesses what ``session`` gives; None: nothing does. There is none beside a pipeline.
    """

    def __init__(
        self,
        artifact: ServedModel,
        session: ServedSession,
        prompts: PromptEncoder,
        config: EngineConfig,
        *,
        pipeline: ServedPipeline | None = None,
        draft: ServedDraft | None = None,
    ) -> None:
        sessions = (session,) if pipeline is None else pipeline.sessions
        super().__init__(
            artifact,
            prompts,
            session.placement,
            context=session.capacity.context,
            served_names=config.served_names,
        )
        self._session = session
        self._pipeline = pipeline
        self._slots = sum(each.capacity.slots for each in sessions)
        most_waiting = -(-config.max_waiting // len(sessions))
        scheduling = [_scheduling(each, config, lanes=len(sessions)) for each in sessions]
        self._guesses = config.guesses is not None
        self._ranking = choose_ranking(config.rank_format, prompts, artifact.manifest.model_id)
        self._intake = Intake(
            artifact,
            session,
            prompts,
            lookup=config.lookup,
            guesses=self._guesses,
            most_waiting=max(1, most_waiting),
            cache_sharing=config.cache_sharing,
        )
        manifest = artifact.manifest
        self._grammars = GrammarCompiler(
            self._tokenizer,
            manifest.model.vocab_size,
            frozenset(manifest.stop_token_ids),
            most_tokens=sum(each.max_waiting_tokens for each in scheduling),
        )
        self._drafter: Drafter | None = None
        self._engines = [
            self._engine(each, rules, draft) for each, rules in zip(sessions, scheduling, strict=True)
        ]
        self._requests = LiveRequests(self._engines, self._grammars)
        if pipeline is not None:
            pipeline.when_ended(self._requests.die)

    def _engine(self, session: ServedSession, rules: SchedulerConfig, draft: ServedDraft | None) -> Engine:
        payoff = Payoff() if self._guesses else None
        if draft is not None:
            limits = DraftLimits(
                slots=draft.capacity.slots,
                context=draft.capacity.context,
                draft_vocab=draft.vocab_size,
                vocab=self.artifact.manifest.model.vocab_size,
                chunk=rules.prefill_chunk,
                most=MOST_DRAFT,
            )
            self._drafter = Drafter(draft, limits, payoff)
        return Engine(session, Scheduler(rules, Guessing(payoff)), drafter=self._drafter)

    def close(self) -> None:
        """Cancel what is live and stop the engine."""
        with self._patience():
            closed = self._requests.close()
        if closed:
            for engine in self._engines:
                engine.close()
            self._grammars.close()
            if self._pipeline is not None:
                self._pipeline.close()

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        """End stages that hold up what is done meanwhile: one that neither answers nor ends."""
        if self._pipeline is None:
            yield
            return
        last = threading.Timer(_STUCK_S, self._pipeline.close)
        last.daemon = True
        last.start()
        try:
            yield
        finally:
            last.cancel()

    def warm_up(self) -> None:
        """Run a short prompt through prefill and decode, so that the first request finds buffers and pages
        ready.

        Grammars are made ready too, where llguidance is installed. Raises what a draft model fails with.
        """
        self._grammars.prepare()
        if self._drafter is not None:  # no sequence is there yet, so that the engine's thread leaves it alone
            self._drafter.warm_up()
        sampling = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=2, ignore_eos=True)
        prompt = TokenPrompt((0,) * min(8, self._session.capacity.context - 1))
        lanes = range(len(self._engines))  # each gets one, as all are submitted before any has ended
        run_together(self, [GenerationRequest(f"warm-up-{lane}", prompt, sampling) for lane in lanes])
        for engine in self._engines:
            if engine.draft_failure is not None:
                raise engine.draft_failure

    def submit(self, request: GenerationRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and queue a request; return what ends it early.

        Raises InvalidRequestError with every bad field, UnsupportedError for a form of answer that llguidance
        would have to be installed for, or UnavailableError once the engine has stopped.
        """
        answers = self._intake.generation(request, sink)
        if answers.needs_model:
            return self._requests.enter(answers, answers.form)
        self._requests.check_open()
        # Nothing for the engine to do: the one update comes on the caller's own thread.
        updates, _ = answers.take(TokenEvent(answers.members[0].sequence, None, FinishReason.LENGTH))
        sink.deliver(updates)
        return _nothing_to_end

    def submit_score(self, request: ScoreRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and queue the continuations of a request; return what ends it early.

        Raises InvalidRequestError with every bad field, UnsupportedError where the graph cannot score, or
        UnavailableError.
        """
        return self._requests.enter(self._intake.score(request, sink))

    def submit_rank(self, request: RankRequest, sink: UpdateSink) -> Abort:
        """Check, tokenise and queue the documents of a request; return what ends it early.

        Raises InvalidRequestError with every bad field, UnsupportedError where the model does not rank, or
        UnavailableError.
        """
        if self._ranking is None:
            raise UnsupportedError(
                f"{self.artifact.manifest.model_id} is not served as a model that ranks documents; of one "
                f"that was trained as Qwen3-Reranker was, start the worker with --rank-format qwen3"
            )
        return self._requests.enter(self._intake.rank(request, self._ranking, sink))

    def submit_embedding(self, request: EmbedRequest, sink: UpdateSink) -> Abort:
        """Raise UnsupportedError: the graph gives logits."""
        raise UnsupportedError(
            f"{self.artifact.manifest.model_id} gives logits and embeds no texts; serve one that was "
            f"exported with --embed last or --embed mean"
        )

    def violations(
        self, prompt: Prompt, sampling: SamplingParams, answers: AnswerOptions
    ) -> list[FieldViolation]:
        """Return every bad field of a prompt and its options, as :meth:`submit` would name them."""
        return self._intake.violations(prompt, sampling, answers)

    def model_info(self) -> ModelInfo:
        """Describe what is served."""
        able = self._session.capabilities
        return self.info(
            slots=self._slots,
            # How many are running decides whether drafts are checked, and a check is another kind of call.
            batch_invariant=able.batch_invariant and not self._guesses,
            limits=able.limits(),
            capabilities=self._capabilities(),
        )

    def _capabilities(self) -> tuple[str, ...]:
        scores = self._session.capabilities.prompt_logits
        found = {
            "generate": True,
            "tokenize": True,
            "chat": self._prompts.has_template,
            "score": scores,
            "rank": scores and self._ranking is not None,
            "structured": self._grammars.available,
        }
        return tuple(name for name, able in found.items() if able)

    def load(self) -> Load:
        """Return how busy the engine is, as of its last step."""
        loads = [engine.load() for engine in self._engines]
        return together(loads, () if self._pipeline is None else self._pipeline.times())


def _scheduling(session: ServedSession, config: EngineConfig, *, lanes: int) -> SchedulerConfig:
    """Return the rules by which a session's calls are planned. lanes: share what may queue."""
    able, capacity = session.capabilities, session.capacity
    return SchedulerConfig(
        slots=capacity.slots,
        budget=capacity.budget,
        prefill_chunk=config.prefill_chunk if able.chunked_prefill else capacity.context,
        max_waiting=-(-config.max_waiting // lanes),
        max_waiting_tokens=-(-(config.max_waiting_tokens or 0) // lanes)
        or max(DEFAULT_MOST_TOKENS, capacity.budget),
        kv_cache=config.kv_cache,
        prefix_cache=config.prefix_cache and able.prefix_reuse,
        strict_reuse=config.strict_reuse,
        attention_crossover=able.attention_crossover,
    )


def _nothing_to_end() -> None:
    """End a request that had ended before it was returned."""
