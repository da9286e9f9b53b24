"""A loaded artifact that answers requests: text in, text out, around the engine's token ids.

The command line and the gRPC servicer both use it. Requests are checked and tokenised on the caller's thread;
detokenising and stop strings run on the engine's thread between steps, so an answer ends at its stop string
exactly.
"""

from __future__ import annotations

import importlib.metadata
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from llorch_serve.answers import Answer, Answers
from llorch_serve.capabilities import Capabilities
from llorch_serve.config import EngineConfig
from llorch_serve.engine import Engine
from llorch_serve.errors import (
    EngineStoppedError,
    FieldViolation,
    InvalidRequestError,
    UnavailableError,
    UsageError,
)
from llorch_serve.intake import Intake
from llorch_serve.load import Load
from llorch_serve.local import stream
from llorch_serve.loop import EngineLoop
from llorch_serve.prompts import PromptEncoder
from llorch_serve.requests import (
    GenerationRequest,
    GenerationUpdate,
    ModelInfo,
    Prompt,
    ScoreRequest,
    TokenPrompt,
    UpdateSink,
)
from llorch_serve.sampler import SamplingRow
from llorch_serve.sampling import SamplingParams, check_defaults
from llorch_serve.scheduler import Scheduler
from llorch_serve.sequence import FinishReason, Sequence, SequenceStatus, TokenEvent
from llorch_serve.served import ServedModel, ServedSession, load_model, open_model
from llorch_serve.session import LoadReport
from llorch_serve.structured.compiler import GrammarCompiler
from llorch_serve.structured.constraint import Program
from llorch_serve.structured.spec import Structured
from llorch_serve.text import Tokenizer

logger = logging.getLogger(__name__)


class Worker:
    """Implements :class:`llorch_serve.requests.TextGenerator` on an artifact. Make one with :meth:`open`."""

    def __init__(
        self,
        artifact: ServedModel,
        session: ServedSession,
        prompts: PromptEncoder,
        config: EngineConfig,
    ) -> None:
        self.artifact = artifact
        self._session = session
        self._prompts = prompts
        self._tokenizer = prompts.tokenizer
        self._live: dict[Sequence, tuple[Answers, Answer]] = {}
        self._by_id: dict[str, Answers] = {}
        self._lock = threading.Lock()
        self._failure: EngineStoppedError | None = None
        self._mourners: list[Callable[[EngineStoppedError], None]] = []
        self._closed = False
        able = session.capabilities
        scheduler = Scheduler(
            slots=session.capacity.slots,
            budget=session.capacity.budget,
            prefill_chunk=config.prefill_chunk if able.chunked_prefill else session.capacity.context,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            kv_cache=config.kv_cache,
            prefix_cache=config.prefix_cache and able.prefix_reuse,
            strict_reuse=config.strict_reuse,
            doubling=able.doubling_position,
        )
        self._lookup = config.lookup
        self._intake = Intake(
            artifact, session, prompts, lookup=config.lookup, most_waiting=max(1, config.max_waiting)
        )
        manifest = artifact.manifest
        self._grammars = GrammarCompiler(
            self._tokenizer, manifest.model.vocab_size, frozenset(manifest.stop_token_ids)
        )
        self._engine = Engine(session, scheduler)
        self._loop = EngineLoop(self._engine, self._on_events, self._on_death)
        self._loop.start()

    @classmethod
    def open(
        cls,
        folder: Path,
        config: EngineConfig,
        report: Callable[[LoadReport], None],
        *,
        tokenizer: Path | None = None,
    ) -> Worker:
        """Load an artifact and start its engine.

        tokenizer: a tokenizer.json to use instead of the artifact's.
        Raises ArtifactError, ProviderError, ResourceError or UsageError.
        """
        artifact = load_model(folder)
        check_defaults(artifact.manifest.generation)
        prompts = PromptEncoder(
            artifact,
            Tokenizer.load(tokenizer or artifact.tokenizer_path),
            tool_format=config.tool_format,
            reasoning_format=config.reasoning_format,
        )
        session = open_model(artifact, config.session, report)
        _check_able(config, session.capabilities, folder)
        return cls(artifact, session, prompts, config)

    def close(self) -> None:
        """Cancel what is live and stop the engine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting = [answers for answers in self._by_id.values() if self._grammars.cancel(answers)]
        for answers in waiting:
            self._end_unseen(answers, None)
        self._loop.stop()
        self._engine.close()
        self._grammars.close()

    def when_dead(self, tell: Callable[[EngineStoppedError], None]) -> None:
        """Have ``tell`` called on the engine's thread if the engine stops after an error; at once if it has."""
        with self._lock:
            self._mourners.append(tell)
            failure = self._failure
        if failure is not None:
            tell(failure)

    def warm_up(self) -> None:
        """Run a short prompt through prefill and decode, so that the first request finds buffers and pages ready.

        Grammars are made ready too, where llguidance is installed.
        """
        self._grammars.prepare()
        sampling = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=2, ignore_eos=True)
        prompt = TokenPrompt((0,) * min(8, self._session.capacity.context - 1))
        for _ in stream(self, GenerationRequest("warm-up", prompt, sampling)):
            pass

    def submit(self, request: GenerationRequest, sink: UpdateSink) -> None:
        """Check, tokenise and queue a request.

        Raises InvalidRequestError with every bad field, UnsupportedError for a form of answer that llguidance would have
        to be installed for, or UnavailableError once the engine has stopped.
        """
        answers, rows = self._intake.generation(request, sink)
        if rows:
            self._enter(answers, rows, request.sampling.structured)
            return
        self._check_open()
        # Nothing for the engine to do: the one update comes on the caller's own thread.
        answer = answers.members[0]
        end = TokenEvent(answer.sequence, None, FinishReason.LENGTH)
        sink.deliver(answers.take(answer.translate(end, self._tokenizer)[0]))

    def submit_score(self, request: ScoreRequest, sink: UpdateSink) -> None:
        """Check, tokenise and queue the continuations of a request.

        Raises InvalidRequestError with every bad field, UnsupportedError where the graph cannot score, or UnavailableError.
        """
        self._enter(*self._intake.score(request, sink))

    def _enter(self, answers: Answers, rows: list[SamplingRow], form: Structured | None = None) -> None:
        """Make a request live and hand its sequences to the loop, once its form's grammar is compiled.

        Raises InvalidRequestError, UnsupportedError or UnavailableError.
        """
        with self._lock:
            self._check_open()
            if answers.request_id in self._by_id:
                found = f"found {answers.request_id!r}, which a live request already has; expected a new one"
                raise InvalidRequestError([FieldViolation("request_id", found)])
            grammar = None
            if form is not None:
                grammar = self._grammars.begin(
                    form,
                    ticket=answers,
                    done=lambda found: self._on_grammar(answers, rows, found),
                )
            self._live.update((answer.sequence, (answers, answer)) for answer in answers.members)
            self._by_id[answers.request_id] = answers
            # Inside the lock, so that no close or abort gets to the engine before what it is to end.
            if form is None or grammar is not None:
                self._hand_over(answers, rows, grammar)

    def violations(self, prompt: Prompt, sampling: SamplingParams) -> list[FieldViolation]:
        """Return every bad field of a prompt and its sampling settings, as :meth:`submit` would name them."""
        return self._intake.violations(prompt, sampling)

    def abort(self, request_id: str) -> None:
        """End a live request; its last update has reason CANCELLED. Idempotent."""
        with self._lock:
            answers = self._by_id.get(request_id)
            if answers is None:
                return
            answers.aborted = True
            waiting = self._grammars.cancel(answers)
        if waiting:
            self._end_unseen(answers, None)
            return
        for sequence in answers.sequences:
            self._loop.abort(sequence)

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return a prompt's token ids and the text they stand for. Raises InvalidRequestError."""
        return self._prompts.encode(prompt)

    def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool) -> str:
        """Return the text of token ids. Raises InvalidRequestError for ids outside the vocabulary."""
        return self._tokenizer.decode(token_ids, keep_special_tokens=keep_special_tokens)

    def model_info(self) -> ModelInfo:
        """Describe what is served."""
        manifest = self.artifact.manifest
        recipe = manifest.recipe
        return ModelInfo(
            model_id=manifest.model_id,
            fingerprint=manifest.fingerprint,
            context_length=self._session.capacity.context,
            vocab_size=manifest.model.vocab_size,
            precision=recipe.precision,
            head_precision=recipe.head_precision,
            provider=self._session.placement.provider,
            provider_node_share=self._session.placement.node_share,
            slots=self._session.capacity.slots,
            has_chat_template=self._prompts.has_template,
            stop_token_ids=manifest.stop_token_ids,
            version=importlib.metadata.version("llorch"),
            # How many are running decides whether drafts are checked, and a check is another kind of call.
            batch_invariant=self._session.capabilities.batch_invariant and not self._lookup,
            kind=self.artifact.kind.value,
            limits=self._session.capabilities.limits(),
            provider_shares=tuple(replace(share, operators=()) for share in self._session.placement.shares),
        )

    def load(self) -> Load:
        """Return how busy the engine is, as of its last step."""
        return self._engine.load()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise UnavailableError(f"the engine has stopped; {self._failure}")
        if self._closed:
            raise UnavailableError("the worker is shutting down")

    def _on_grammar(self, answers: Answers, rows: list[SamplingRow], found: Program | Exception) -> None:
        """Queue a request whose grammar is compiled, or end it. The compiling thread."""
        if isinstance(found, Exception):
            self._end_unseen(answers, found)
            return
        with self._lock:
            live = self._by_id.get(answers.request_id) is answers
            wanted = live and not (self._closed or answers.aborted)
            if wanted:
                self._hand_over(answers, rows, found)
        if not wanted:
            self._end_unseen(answers, None)

    def _hand_over(self, answers: Answers, rows: list[SamplingRow], grammar: Program | None) -> None:
        """Give a request's sequences to the loop, each with the grammar from its beginning."""
        if grammar is not None:
            for sequence, row in zip(answers.sequences, rows, strict=True):
                row.constraint = grammar.begin(sequence.stop_ids)
        self._loop.add(*zip(answers.sequences, rows, strict=True))

    def _end_unseen(self, answers: Answers, error: Exception | None) -> None:
        """End a request that has not got to the engine: with an error, or cancelled. Idempotent; any thread."""
        with self._lock:  # at once, since the engine may die meanwhile and end every request itself
            if self._by_id.get(answers.request_id) is not answers:
                return
            self._forget(answers)
        if error is not None:
            answers.sink.deliver([GenerationUpdate(answers.request_id, "", (), error=error)])
            return
        updates: list[GenerationUpdate] = []
        for answer in answers.members:
            event = TokenEvent(answer.sequence, None, FinishReason.CANCELLED)
            update, _ = self._translate_alone(answer, event)
            updates += answers.take(update)
            if update.error is not None:
                break
        answers.sink.deliver(updates)

    def _on_events(self, events: list[TokenEvent]) -> list[Sequence]:
        """Turn a step's events into updates, one delivery a sink; return what a stop string has ended."""
        by_sink: dict[int, tuple[UpdateSink, list[GenerationUpdate]]] = {}
        ended_early = []
        for event in events:
            live = self._live.get(event.sequence)
            if live is None:
                continue
            answers, answer = live
            update, stopped = self._translate_alone(answer, event)
            if stopped and event.finish is None:
                ended_early.append(event.sequence)
            told = answers.take(update)
            if answers.open == 0 or update.error is not None:
                ended_early += self._end(answers)
            elif update.completion is not None:
                with self._lock:
                    del self._live[event.sequence]
            if told:
                by_sink.setdefault(id(answers.sink), (answers.sink, []))[1].extend(told)
        for sink, updates in by_sink.values():
            sink.deliver(updates)
        return ended_early

    def _end(self, answers: Answers) -> list[Sequence]:
        """Forget a request; return those of its sequences that have not ended, since another one's error ends all."""
        with self._lock:
            self._forget(answers)
        return [s for s in answers.sequences if s.status is not SequenceStatus.FINISHED]

    def _forget(self, answers: Answers) -> None:
        """Forget a request; the lock is held."""
        del self._by_id[answers.request_id]
        for sequence in answers.sequences:
            self._live.pop(sequence, None)

    def _translate_alone(self, answer: Answer, event: TokenEvent) -> tuple[GenerationUpdate, bool]:
        """Return what :meth:`Answer.translate` does; what fails there ends this request and no other."""
        try:
            return answer.translate(event, self._tokenizer)
        except Exception as error:  # noqa: BLE001 - tokenizer or memory: told to the caller, and logged there
            return GenerationUpdate(answer.request_id, "", (), error=error, index=answer.index), False

    def _on_death(self, error: BaseException) -> None:
        """Log the error, tell every caller and who watches that the engine is gone; nothing is answered after this."""
        failure = EngineStoppedError(secrets.token_hex(4))
        logger.error("the engine stopped, error id %s", failure.error_id, exc_info=error)
        with self._lock:
            self._failure = failure
            live, self._live, self._by_id = list(self._by_id.values()), {}, {}
            for answers in live:
                self._grammars.cancel(answers)  # one that is still compiled has nobody left to be handed to
            mourners = list(self._mourners)
        for tell in mourners:
            tell(failure)
        for answers in live:
            answers.sink.deliver([GenerationUpdate(answers.request_id, "", (), error=failure)])


def _check_able(config: EngineConfig, able: Capabilities, folder: Path) -> None:
    """Raise UsageError for a setting that the loaded graph can give no effect."""
    for flag, asked, possible in (
        (f"--lookup {config.lookup}", bool(config.lookup), able.drafts),
        ("--strict-reuse", config.strict_reuse, able.prefix_reuse),
    ):
        if asked and not possible:
            raise UsageError(
                f"{flag} has no effect on the graph in {folder} ({'; '.join(able.limits())}); leave it out"
            )
