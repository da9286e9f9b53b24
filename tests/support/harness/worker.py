"""A real worker, loop, engine, scheduler and tokenizer around the fake session, and a sink that keeps what it
is given.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from llorch_serve.artifact.folder import Artifact
from llorch_serve.config import EngineConfig
from llorch_serve.requests import (
    AnswerOptions,
    Completion,
    GenerationRequest,
    GenerationUpdate,
    Prompt,
    TokenPrompt,
)
from llorch_serve.runtime.session import DecoderSession
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.prompts import PromptEncoder
from llorch_serve.worker.worker import Worker
from support.builders.checkpoints import tiny_tokenizer_json
from support.builders.tiny_artifact import tiny_manifest, write_tiny_artifact
from support.fakes.session import FakeSession, Rule

VOCAB = 512
CONTEXT = 48
PATIENCE_S = 20.0
TOKENIZER = Tokenizer.from_json(tiny_tokenizer_json().encode(), origin="tiny")


def script(prompt: Sequence[int], answer: Sequence[int]) -> Rule:
    """Return the rule that makes the model answer ``prompt`` with ``answer``, and go on as it likes."""
    start, wanted = tuple(prompt), tuple(answer)

    def rule(tokens: tuple[int, ...]) -> int | None:
        place = len(tokens) - len(start)
        return wanted[place] if tokens[: len(start)] == start and 0 <= place < len(wanted) else None

    return rule


@dataclass(slots=True)
class Answer:
    """All updates of one request, joined."""

    updates: list[GenerationUpdate] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(update.text for update in self.updates)

    @property
    def ids(self) -> list[int]:
        return [token for update in self.updates for token in update.token_ids]

    @property
    def completion(self) -> Completion:
        found = self.updates[-1].completion
        assert found is not None, self.updates[-1].error
        return found

    @property
    def error(self) -> Exception:
        found = self.updates[-1].error
        assert found is not None
        return found


class Sink:
    """Keeps deliveries; sorts them by request when asked."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[list[GenerationUpdate]] = queue.SimpleQueue()
        self.deliveries: list[list[GenerationUpdate]] = []

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        self.queue.put(list(updates))

    def next(self) -> list[GenerationUpdate]:
        updates = self.queue.get(timeout=PATIENCE_S)
        self.deliveries.append(updates)
        return updates

    def answers(self, *names: str) -> dict[str, Answer]:
        """Wait until all of these have ended; return everything so far. Nothing may follow a last update."""
        while not all(self._ended(name) for name in names):
            self.next()
        while not self.queue.empty():
            self.next()
        found: dict[str, Answer] = {}
        for update in (u for updates in self.deliveries for u in updates):
            answer = found.setdefault(update.request_id, Answer())
            assert not (answer.updates and answer.updates[-1].is_last), "an update after the last one"
            answer.updates.append(update)
        return found

    def _ended(self, name: str) -> bool:
        return any(u.is_last and u.request_id == name for updates in self.deliveries for u in updates)


def make_worker(
    folder: Path,
    session: FakeSession | None = None,
    *,
    config: EngineConfig | None = None,
    template: str | None = None,
    **manifest: object,
) -> Worker:
    """Start a worker on a tiny artifact, maybe with another template; keywords replace fields of its
    manifest.
    """
    artifact = Artifact(folder=write_tiny_artifact(folder), manifest=tiny_manifest(**manifest))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    fake = session or make_session()
    options = config or EngineConfig(prefill_chunk=4)
    prompts = PromptEncoder(
        artifact, TOKENIZER, tool_format=options.tool_format, reasoning_format=options.reasoning_format
    )
    return Worker(artifact, cast("DecoderSession", fake), prompts, options)


def make_session(**options: Any) -> FakeSession:
    """Return a fake session of the tiny tokenizer's vocabulary."""
    return FakeSession(**{"vocab_size": VOCAB, "context": CONTEXT, "slots": 4, **options})


def request(name: str, prompt: Prompt | Sequence[int], **sampling: Any) -> GenerationRequest:
    """Return a request; greedy, and for token ids without further ado. Options of answers go where they
    belong.
    """
    asked = prompt if not isinstance(prompt, (tuple, list)) else TokenPrompt(tuple(prompt))
    answers, params = split_options({"temperature": 0, **sampling})
    return GenerationRequest(name, cast("Prompt", asked), params, answers=answers)


def split_options(options: dict[str, Any]) -> tuple[AnswerOptions, SamplingParams]:
    """Return options of answers and of sampling, given together."""
    names = AnswerOptions.__dataclass_fields__.keys()
    answers = AnswerOptions(**{name: value for name, value in options.items() if name in names})
    return answers, SamplingParams(**{name: value for name, value in options.items() if name not in names})


def ask(worker: Worker, prompt: Prompt | Sequence[int], name: str = "r", **sampling: Any) -> Answer:
    """Submit one request and return its answer."""
    sink = Sink()
    worker.submit(request(name, prompt, **sampling), sink)
    return sink.answers(name)[name]
