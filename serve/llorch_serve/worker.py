"""A loaded artifact that answers requests: text in, text out, around the engine's token ids.

The command line and the gRPC servicer both use it. Requests are checked and tokenised on the caller's thread;
detokenising and stop strings run on the engine's thread between steps, so an answer ends at its stop string
exactly.
"""

from __future__ import annotations

import importlib.metadata
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llorch_serve.capabilities import Capabilities
from llorch_serve.config import EngineConfig
from llorch_serve.engine import Engine
from llorch_serve.errors import FieldViolation, InvalidRequestError, LlorchError, UnavailableError, UsageError
from llorch_serve.foreign.model import UNSTATED
from llorch_serve.load import Load
from llorch_serve.local import stream
from llorch_serve.lookup import PromptLookup
from llorch_serve.loop import EngineLoop
from llorch_serve.prompts import PromptEncoder
from llorch_serve.requests import (
    Completion,
    GenerationRequest,
    GenerationUpdate,
    ModelInfo,
    Prompt,
    Timings,
    TokenPrompt,
    UpdateSink,
)
from llorch_serve.sampler import SamplingRow
from llorch_serve.sampling import SamplingParams, check_defaults, resolve
from llorch_serve.scheduler import Scheduler
from llorch_serve.sequence import FinishReason, Sequence, TokenEvent
from llorch_serve.served import ServedModel, ServedSession, load_model, open_model
from llorch_serve.session import LoadReport
from llorch_serve.structured.compiler import GrammarCompiler
from llorch_serve.structured.constraint import Constraint
from llorch_serve.text import TextStream, Tokenizer


@dataclass(slots=True)
class _Live:
    """A request between submission and its last update. aborted: its grammar need not be waited for."""

    request: GenerationRequest
    sequence: Sequence
    sink: UpdateSink
    stream: TextStream
    seed: int
    aborted: bool = False


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
        self._live: dict[Sequence, _Live] = {}
        self._by_id: dict[str, Sequence] = {}
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._closed = False
        able = session.capabilities
        scheduler = Scheduler(
            slots=session.capacity.slots,
            budget=session.capacity.budget,
            prefill_chunk=config.prefill_chunk if able.chunked_prefill else session.capacity.context,
            max_waiting=config.max_waiting,
            kv_cache=config.kv_cache,
            prefix_cache=config.prefix_cache and able.prefix_reuse,
            strict_reuse=config.strict_reuse,
            doubling=able.doubling_position,
        )
        self._lookup = config.lookup
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
        prompts = PromptEncoder(artifact, Tokenizer.load(tokenizer or artifact.tokenizer_path))
        session = open_model(artifact, config.session, report)
        _check_able(config, session.capabilities, folder)
        return cls(artifact, session, prompts, config)

    def close(self) -> None:
        """Cancel what is live and stop the engine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting = [live for live in self._live.values() if self._grammars.cancel(live.sequence)]
        for live in waiting:
            self._end_unseen(live, None)
        self._loop.stop()
        self._engine.close()
        self._grammars.close()

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
        info = self.artifact.manifest
        bad = request.sampling.violations(vocab_size=info.model.vocab_size)
        ids: tuple[int, ...] = ()
        try:
            ids, _ = self._prompts.encode(request.prompt)
        except InvalidRequestError as error:
            bad += error.violations
        else:
            bad += self._prompts.violations(ids, context=self._session.capacity.context)
        if bad:
            raise InvalidRequestError(bad)
        resolved = resolve(request.sampling, info.generation, lambda: secrets.randbits(63))
        stop_ids = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stop_ids.update(info.stop_token_ids)
        room = self._session.capacity.context - len(ids)
        wanted = room if request.sampling.max_tokens is None else min(request.sampling.max_tokens, room)
        sequence = Sequence(
            request_id=request.request_id,
            token_ids=list(ids),
            prompt_length=len(ids),
            max_new_tokens=wanted,
            stop_ids=frozenset(stop_ids),
            client=request.client_id,
            lookup=PromptLookup(ids, max_draft=self._lookup) if self._lookup else None,
            submitted_at=time.perf_counter(),
        )
        text = TextStream(self._tokenizer, request.sampling.stop)
        live = _Live(request, sequence, sink, text, resolved.seed)
        if wanted == 0:
            self._check_open()
            # Nothing for the engine to do: the one update comes on the caller's own thread.
            sink.deliver([_update(live, "", (), self._completion(live, FinishReason.LENGTH, None))])
            return
        row = SamplingRow.begin(resolved, prompt_ids=ids, stop_ids=stop_ids, vocab_size=info.model.vocab_size)
        with self._lock:
            self._check_open()
            if request.request_id in self._by_id:
                found = f"found {request.request_id!r}, which a live request already has; expected a new one"
                raise InvalidRequestError([FieldViolation("request_id", found)])
            if (form := request.sampling.structured) is not None:
                row.constraint = self._grammars.begin(
                    form,
                    sequence.stop_ids,
                    ticket=sequence,
                    done=lambda found: self._on_grammar(live, row, found),
                )
            self._live[sequence] = live
            self._by_id[request.request_id] = sequence
            # Inside the lock, so that no close or abort gets to the engine before what it is to end.
            if form is None or row.constraint is not None:
                self._loop.add(sequence, row)

    def abort(self, request_id: str) -> None:
        """End a live request; its last update has reason CANCELLED. Idempotent."""
        with self._lock:
            sequence = self._by_id.get(request_id)
            if sequence is None:
                return
            live = self._live[sequence]
            live.aborted = True
            waiting = self._grammars.cancel(sequence)
        if waiting:
            self._end_unseen(live, None)
        else:
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
            # The CPU's fp32, fp16 and 8-bit kernels give a row the same bits in any batch; its 4-bit kernel does not.
            batch_invariant=not self._session.capabilities.batched_decode
            or not {"int4", "source", UNSTATED} & recipe.precisions,
            kind=self.artifact.kind.value,
            limits=self._session.capabilities.limits(),
        )

    def load(self) -> Load:
        """Return how busy the engine is, as of its last step."""
        return self._engine.load()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise UnavailableError(f"the engine has stopped after an error: {self._failure}")
        if self._closed:
            raise UnavailableError("the worker is shutting down")

    def _on_grammar(self, live: _Live, row: SamplingRow, found: Constraint | Exception) -> None:
        """Queue a request whose grammar is compiled, or end it. The compiling thread."""
        if isinstance(found, Exception):
            self._end_unseen(live, found)
            return
        with self._lock:
            wanted = live.sequence in self._live and not (self._closed or live.aborted)
            if wanted:
                row.constraint = found
                self._loop.add(live.sequence, row)
        if not wanted:
            self._end_unseen(live, None)

    def _end_unseen(self, live: _Live, error: Exception | None) -> None:
        """End a request that has not got to the engine: with an error, or cancelled. Idempotent; any thread."""
        with self._lock:
            if self._live.pop(live.sequence, None) is None:
                return
            del self._by_id[live.request.request_id]
        update = _update(live, "", (), self._completion(live, FinishReason.CANCELLED, None))
        if error is not None:
            update = GenerationUpdate(live.request.request_id, "", (), error=error)
        live.sink.deliver([update])

    def _on_events(self, events: list[TokenEvent]) -> list[Sequence]:
        """Turn a step's events into updates, one delivery a sink; return what a stop string has ended."""
        by_sink: dict[int, tuple[UpdateSink, list[GenerationUpdate]]] = {}
        ended_early = []
        for event in events:
            live = self._live.get(event.sequence)
            if live is None:
                continue
            update, stopped = self._translate(live, event)
            if stopped and event.finish is None:
                ended_early.append(event.sequence)
            if update.is_last:
                with self._lock:
                    del self._live[event.sequence]
                    del self._by_id[live.request.request_id]
            by_sink.setdefault(id(live.sink), (live.sink, []))[1].append(update)
        for sink, updates in by_sink.values():
            sink.deliver(updates)
        return ended_early

    def _translate(self, live: _Live, event: TokenEvent) -> tuple[GenerationUpdate, bool]:
        """Return the update of one event, and whether a stop string ended the answer."""
        if event.error is not None:
            return GenerationUpdate(live.request.request_id, "", (), error=event.error), False
        text, matched = "", None
        ids: tuple[int, ...] = ()
        if event.token_id is not None and not event.is_stop_token:
            text, matched = live.stream.push(event.token_id)
            ids = (event.token_id,)
        if matched is not None:
            return _update(live, text, ids, self._completion(live, FinishReason.STOP, matched)), True
        if event.finish is None:
            return _update(live, text, ids, None), False
        text += live.stream.finish()
        stop_text = None
        if event.is_stop_token and event.token_id is not None:
            stop_text = self._tokenizer.token_text(event.token_id)
        return _update(live, text, ids, self._completion(live, event.finish, stop_text)), False

    def _completion(self, live: _Live, reason: FinishReason, stop_matched: str | None) -> Completion:
        s = live.sequence
        started = s.submitted_at if s.started_at is None else s.started_at
        first = started if s.first_token_at is None else s.first_token_at
        last = first if s.last_token_at is None else s.last_token_at
        return Completion(
            reason=reason,
            stop_matched=stop_matched,
            prompt_tokens=s.prompt_length,
            generated_tokens=s.generated,
            cached_tokens=s.cached_tokens,
            drafted_tokens=s.drafted,
            accepted_tokens=s.accepted,
            seed=live.seed,
            timings=Timings(
                queue_s=started - s.submitted_at, prefill_s=first - started, decode_s=last - first
            ),
        )

    def _on_death(self, error: BaseException) -> None:
        """Tell every caller that the engine is gone; nothing is answered after this."""
        with self._lock:
            self._failure = error
            live, self._live, self._by_id = list(self._live.values()), {}, {}
        failure = LlorchError(f"the engine stopped: {type(error).__name__}: {error}")
        for entry in live:
            entry.sink.deliver([GenerationUpdate(entry.request.request_id, "", (), error=failure)])


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


def _update(live: _Live, text: str, ids: tuple[int, ...], completion: Completion | None) -> GenerationUpdate:
    return GenerationUpdate(live.request.request_id, text, ids, completion)
