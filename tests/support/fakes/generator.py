"""A TextGenerator without a model: its own thread plays the engine, and a test decides when it steps.

Answers are the words ``w0 w1 w2 ...`` with token ids 0, 1, 2, ...; a prompt's token ids are its UTF-8 bytes.
Run as a script, it serves itself until a signal comes (see :func:`main`).
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from llorch_serve.engine.load import Load
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import EngineStoppedError, FieldViolation, InvalidRequestError, QueueFullError
from llorch_serve.providers import ProviderShare
from llorch_serve.requests import (
    Abort,
    AnswerOptions,
    ChatPrompt,
    Completion,
    ContinuationScore,
    GenerationRequest,
    GenerationUpdate,
    ModelInfo,
    Prompt,
    ScoreRequest,
    TextPrompt,
    Timings,
    TokenPrompt,
    UpdateSink,
    option_violations,
)
from llorch_serve.sampling.params import SamplingParams

PATIENCE_S = 20.0
VOCAB_SIZE = 256
DRAWN_SEED = 4711  # of requests that have none

INFO = ModelInfo(
    model_id="fake-1M",
    fingerprint="f" * 64,
    context_length=4096,
    vocab_size=VOCAB_SIZE,
    precision="int8",
    head_precision="fp32",
    provider="FakeExecutionProvider",
    provider_node_share=0.75,
    slots=8,
    has_chat_template=True,
    stop_token_ids=(2, 7),
    version="0.0.test",
    batch_invariant=True,
    kind="optimum",
    limits=("no batching", "no chunked prefill"),
    provider_shares=(
        ProviderShare("FakeExecutionProvider", 0.75, 0.875),
        ProviderShare("CPUExecutionProvider", 0.25, 0.125),
    ),
    device="fake:3",
    capabilities=("generate", "tokenize", "chat"),
)


LOAD = Load(
    running=1,
    waiting=2,
    slots=8,
    kv_tokens_running=3,
    kv_tokens_idle=4,
    kv_tokens_total=2**33,
    prompt_tokens=6,
    cached_tokens=7,
    generated_tokens=8,
    drafted_tokens=9,
    accepted_tokens=10,
)


@dataclass(slots=True)
class _Live:
    request: GenerationRequest
    sink: UpdateSink
    prompt_tokens: int
    produced: int = 0
    aborted: bool = False


class FakeGenerator:
    """Generates one word a step for every live request; steps when told to, or always (``free_running``).

    slots: requests that run at once; the others wait. capacity: most live requests; beyond it the queue is
        full.
    padding: characters after each word, for answers of many bytes. served_names: as
    :class:`llorch_serve.requests.ModelInfo` has them.
    """

    def __init__(
        self,
        *,
        free_running: bool = True,
        slots: int = 8,
        capacity: int = 64,
        padding: int = 0,
        served_names: tuple[str, ...] = (),
    ) -> None:
        self._served_names = served_names
        self._condition = threading.Condition()
        self._free_running = free_running
        self._slots = slots
        self._capacity = capacity
        self._padding = "." * padding
        self._steps_allowed = 0
        self._live: dict[str, _Live] = {}
        self._closing = False
        self._death_listeners: list[Callable[[EngineStoppedError], None]] = []
        self.steps = 0
        self.submitted: list[GenerationRequest] = []
        self.scored: list[ScoreRequest] = []
        self.aborted: list[str] = []
        self.fail_submit: Exception | None = None  # raised by the next submissions
        self.fail_step: Exception | None = None  # ends what runs at the next step
        self.submit_gate: threading.Event | None = None  # submissions wait for it, as if the prompt were long
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    # The TextGenerator protocol.

    def submit(self, request: GenerationRequest, sink: UpdateSink) -> Abort:
        with self._condition:
            self.submitted.append(request)
            self._condition.notify_all()
        if self.submit_gate is not None:
            assert self.submit_gate.wait(PATIENCE_S)
        if self.fail_submit is not None:
            raise self.fail_submit
        bad = option_violations(request.sampling, request.answers, vocab_size=VOCAB_SIZE)
        if bad:
            raise InvalidRequestError(bad)
        with self._condition:
            if len(self._live) >= self._capacity:
                raise QueueFullError(f"{len(self._live)} requests are live; try again", retry_after_s=1.5)
            live = _Live(request, sink, len(self.tokenize(request.prompt)[0]))
            self._live[request.request_id] = live
            self._condition.notify_all()
        return partial(self._abort, live)

    def submit_score(self, request: ScoreRequest, sink: UpdateSink) -> Abort:
        """Score every continuation at once, each token at a log-probability of -1."""
        if self.fail_submit is not None:
            raise self.fail_submit
        self.scored.append(request)
        context = len(self.tokenize(request.context)[0])
        counts = [len(self.tokenize(continuation)[0]) for continuation in request.continuations]
        scored = _Live(GenerationRequest(request.request_id, request.context), sink, context)
        sink.deliver(
            [
                GenerationUpdate(
                    request.request_id,
                    "",
                    (),
                    self._complete(scored, FinishReason.LENGTH),
                    index=index,
                    open_answers=len(counts) - index - 1,
                    score=ContinuationScore(-float(count), False, count, context, 0),
                )
                for index, count in enumerate(counts)
            ]
        )
        return partial(self._abort, scored)

    def violations(
        self, prompt: Prompt, sampling: SamplingParams, answers: AnswerOptions
    ) -> list[FieldViolation]:
        return option_violations(sampling, answers, vocab_size=VOCAB_SIZE)

    def when_dead(self, tell: Callable[[EngineStoppedError], None]) -> None:
        self._death_listeners.append(tell)

    def die(self, error: EngineStoppedError) -> None:
        """Play a dead engine: what is live stays as it is, and whoever watches is told."""
        for tell in self._death_listeners:
            tell(error)

    def _abort(self, live: _Live) -> None:
        with self._condition:
            self.aborted.append(live.request.request_id)
            live.aborted = True
            self._condition.notify_all()

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        match prompt:
            case TextPrompt(text):
                return tuple(text.encode()), text
            case TokenPrompt(ids):
                return ids, self.detokenize(ids, keep_special_tokens=True)
            case ChatPrompt(messages):
                text = "".join(f"<{m.role}>{m.content}" for m in messages)
                return tuple(text.encode()), text

    def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool) -> str:
        outside = [t for t in token_ids if t >= VOCAB_SIZE]
        if outside:
            raise InvalidRequestError(
                [FieldViolation("token_ids", f"found {outside[0]}, expected below {VOCAB_SIZE}")]
            )
        kept = [t for t in token_ids if keep_special_tokens or t not in INFO.stop_token_ids]
        return bytes(kept).decode("utf-8", "replace")

    def model_info(self) -> ModelInfo:
        return replace(INFO, served_names=self._served_names)

    def load(self) -> Load:
        return LOAD

    def close(self) -> None:
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    # What a test does and sees.

    def step(self, count: int = 1) -> None:
        """Let the engine make so many more steps."""
        with self._condition:
            self._steps_allowed += count
            self._condition.notify_all()

    def run_freely(self) -> None:
        """Let the engine step whenever it has work."""
        with self._condition:
            self._free_running = True
            self._condition.notify_all()

    def abort(self, request_id: str) -> None:
        """End a live request from the worker's side."""
        self._abort(self._live[request_id])

    @property
    def live_ids(self) -> list[str]:
        return list(self._live)

    def wait_for(self, happened: Callable[[FakeGenerator], object]) -> None:
        """Return once ``happened(self)`` is true; it is looked at after everything that changes."""
        with self._condition:
            assert self._condition.wait_for(lambda: happened(self), PATIENCE_S), "it never happened"

    @property
    def closed(self) -> bool:
        return not self._thread.is_alive()

    # The engine's thread.

    def _may_step(self) -> bool:
        if any(live.aborted for live in self._live.values()) or self._closing:
            return True
        return bool(self._live) and (self._free_running or self._steps_allowed > 0)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(self._may_step)
                if self._closing:
                    for live in self._live.values():
                        live.aborted = True
                updates = self._make_step()
                self._condition.notify_all()
                sinks = {id(sink): sink for _, sink in updates}
                for key, sink in sinks.items():
                    sink.deliver([update for update, target in updates if id(target) == key])
                if self._closing:
                    return

    def _make_step(self) -> list[tuple[GenerationUpdate, UpdateSink]]:
        updates = []
        if not any(live.aborted for live in self._live.values()):
            self.steps += 1
            self._steps_allowed = max(0, self._steps_allowed - 1)
        for request_id, live in list(self._live.items())[: self._slots]:
            if not live.aborted:
                updates.append((self._advance(request_id, live), live.sink))
        for request_id, live in list(self._live.items()):
            if live.aborted:
                completion = self._complete(live, FinishReason.CANCELLED)
                updates.append((GenerationUpdate(request_id, "", (), completion), live.sink))
        for update, _ in updates:
            if update.is_last:
                del self._live[update.request_id]
        return updates

    def _advance(self, request_id: str, live: _Live) -> GenerationUpdate:
        if self.fail_step is not None:
            return GenerationUpdate(request_id, "", (), error=self.fail_step)
        limit = live.request.sampling.max_tokens
        word = f"w{live.produced} "
        if word.strip() in live.request.sampling.stop:
            completion = self._complete(live, FinishReason.STOP, word.strip())
            return GenerationUpdate(request_id, "", (), completion)
        token_id = live.produced % VOCAB_SIZE
        live.produced += 1
        done = live.produced >= (limit if limit is not None else INFO.context_length - live.prompt_tokens)
        completion = self._complete(live, FinishReason.LENGTH) if done else None
        return GenerationUpdate(request_id, word + self._padding, (token_id,), completion)

    def _complete(self, live: _Live, reason: FinishReason, matched: str | None = None) -> Completion:
        seed = live.request.sampling.seed
        return Completion(
            reason=reason,
            stop_matched=matched,
            prompt_tokens=live.prompt_tokens,
            generated_tokens=live.produced,
            seed=DRAWN_SEED if seed is None else seed,
            timings=Timings(0.25, 0.5, 1.75),
        )


def main() -> None:
    """Serve on a free port of the loopback: ``fake_generator.py MODE DRAIN_TIMEOUT_S``.

    MODE ``steps``: a line on stdin lets the engine step once. ``stuck``: it never steps, and once as many
    requests are live as a line says, TAKEN is printed. ``dying``: a line kills it. Prints BOUND and READY
    with the address, and CLOSED at the end.
    """
    from llorch_serve.lifecycle.serving import serve
    from llorch_serve.rpc.server import ServerConfig

    def say(*words: str) -> None:
        sys.stdout.write(" ".join(words) + "\n")
        sys.stdout.flush()

    generator = FakeGenerator(free_running=False)
    if sys.argv[1] == "steps":

        def read() -> None:
            for _ in sys.stdin:
                generator.step()

        threading.Thread(target=read, daemon=True).start()
    elif sys.argv[1] == "stuck":

        def count() -> None:
            wanted = int(sys.stdin.readline())
            generator.wait_for(lambda g: len(g.live_ids) >= wanted)
            say("TAKEN")

        threading.Thread(target=count, daemon=True).start()
    elif sys.argv[1] == "dying":

        def kill() -> None:
            sys.stdin.readline()
            generator.wait_for(lambda g: g.live_ids)
            generator.die(EngineStoppedError("4711"))

        threading.Thread(target=kill, daemon=True).start()

    config = ServerConfig(port=0, drain_timeout_s=float(sys.argv[2]))
    asyncio.run(
        serve(lambda: generator, config, on_bound=partial(say, "BOUND"), on_ready=partial(say, "READY"))
    )
    say("CLOSED")


if __name__ == "__main__":
    main()
