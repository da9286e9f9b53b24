"""Whether required calls of tools keep their schemas, and leave other requests alone: ``ci/measurement
forced_calls ARTIFACT [CALLS]``.

A model is served with the templates of others, one for each way in which calls are written, from the folder
that LLORCH_LLAMA_CPP_MODELS names. For each template so many calls (200) of tools with random schemas are
required, half of them of one tool by name, three quarters of them one call at most, at temperature 1, beside
requests that are free. Printed are the calls that were made, those whose arguments jsonschema accepts, and
the free requests whose token ids are those that they have alone. It fails unless all of them are; an answer
that meets MAX_TOKENS is counted apart.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import jsonschema

from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import QueueFullError
from llorch_serve.loading.models import load_model, open_model
from llorch_serve.requests import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    GenerationUpdate,
    JoinedUpdates,
    ToolChoice,
    ToolMode,
    whole_calls,
)
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.prompts import PromptEncoder
from llorch_serve.worker.worker import Worker
from support.builders.tool_schemas import as_tools, random_tools

TEMPLATES: Final = (
    "Qwen-Qwen2.5-7B-Instruct",
    "meta-llama-Llama-3.1-8B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
)
SLOTS: Final = 8
FREE: Final = 8
MAX_TOKENS: Final = 600
QUESTIONS: Final = ("What is the weather in Rome?", "Book a table for two.", "How far is the moon?")


class _WithTemplate:
    """A model with another one's template."""

    def __init__(self, model: Any, source: str) -> None:
        self._model = model
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def chat_templates(self) -> dict[str, str]:
        return {"default": self._source}


class _Sink:
    def __init__(self) -> None:
        self._updates: queue.SimpleQueue[list[GenerationUpdate]] = queue.SimpleQueue()

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        self._updates.put(updates)

    def answers(self, count: int) -> dict[str, GenerationUpdate]:
        """Wait for so many answers, and return each as one update."""
        parts: dict[str, JoinedUpdates] = {}
        ended = 0
        while ended < count:
            for update in self._updates.get():
                if update.error is not None:
                    raise update.error
                if update.request_id in parts:
                    parts[update.request_id].add(update)
                else:
                    parts[update.request_id] = JoinedUpdates(update)
                ended += update.is_last
        return {name: joined.joined() for name, joined in parts.items()}


def load(folder: Path, source: str) -> Worker:
    """Serve a model with another one's template, so that neighbours give the same bits in any company."""
    config = EngineConfig(session=SessionConfig(slots=SLOTS), prefix_cache=False, max_waiting=4096)
    loaded = load_model(folder)
    model = cast("Any", _WithTemplate(loaded, source))
    prompts = PromptEncoder(model, Tokenizer.load(model.tokenizer_path))
    worker = Worker(model, open_model(loaded, config.session, lambda _: None), prompts, config)
    if not worker.model_info().batch_invariant:
        raise SystemExit(
            f"{folder} gives other bits in other batches; measure one that does not (int8, fp32)"
        )
    worker.warm_up()
    return worker


def held(seed: int) -> GenerationRequest:
    """Return a request that must call a tool."""
    tools = random_tools(seed)
    names = tuple(tools)[:1] if seed % 2 else ()
    prompt = ChatPrompt(
        (ChatMessage("user", QUESTIONS[seed % len(QUESTIONS)]),),
        tools=as_tools(tools),
        tool_choice=ToolChoice(ToolMode.REQUIRED, names),
        parallel_tool_calls=seed % 4 == 2,
        template_arguments='{"date_string": "26 Jul 2024"}',
    )
    return GenerationRequest(
        f"held {seed}", prompt, SamplingParams(temperature=1, seed=seed, max_tokens=MAX_TOKENS)
    )


def free(seed: int) -> GenerationRequest:
    """Return a request that may answer as it likes."""
    prompt = ChatPrompt((ChatMessage("user", f"Tell me {seed + 2} things about the sea."),))
    return GenerationRequest(
        f"free {seed}", prompt, SamplingParams(temperature=1, seed=seed, max_tokens=32, ignore_eos=True)
    )


def ask(worker: Worker, requests: Sequence[GenerationRequest]) -> dict[str, GenerationUpdate]:
    """Submit requests together, and return their answers."""
    sink = _Sink()
    for request in requests:
        while True:
            try:
                worker.submit(request, sink)
                break
            except QueueFullError as error:  # so many grammars wait to be compiled
                time.sleep(error.retry_after_s or 1.0)
    return sink.answers(len(requests))


def spread(many: Sequence[GenerationRequest], few: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    """Return both, the few in even steps among the many."""
    step = max(1, len(many) // len(few))
    mixed: list[GenerationRequest] = []
    for index, request in enumerate(many):
        mixed.append(request)
        if index % step == 0 and index // step < len(few):
            mixed.append(few[index // step])
    return [*mixed, *few[-(-len(many) // step) :]]


def measure(folder: Path, name: str, source: str, count: int) -> bool:
    """Print one template's line; return whether all of it is as it should be."""
    worker = load(folder, source)
    others = [free(seed) for seed in range(FREE)]
    alone = ask(worker, others)
    started = time.monotonic()
    answers = ask(worker, spread([held(seed) for seed in range(count)], others))
    took_s = time.monotonic() - started
    worker.close()
    made = valid = cut = tokens = 0
    for seed in range(count):
        answer, tools = answers[f"held {seed}"], random_tools(seed)
        assert answer.completion is not None
        tokens += answer.completion.generated_tokens
        cut += answer.completion.reason is FinishReason.LENGTH
        calls = whole_calls(answer.tool_calls)
        made += len(calls)
        named = set(tools) if seed % 2 == 0 else {next(iter(tools))}
        if calls and not answer.text and (len(calls) == 1 or seed % 4 == 2):
            valid += all(call.name in named and _keeps(call.arguments, tools[call.name]) for call in calls)
    same = sum(
        answers[request.request_id].token_ids == alone[request.request_id].token_ids for request in others
    )
    print(  # noqa: T201 - a script's output
        f"{name}: {count} answers, {made} calls, {valid} answers valid, {cut} cut at {MAX_TOKENS} tokens, "
        f"{same} of {FREE} neighbours with the same ids; {tokens} tokens in {took_s:.0f} s"
    )
    return valid + cut == count and same == FREE


def _keeps(arguments: str, schema: dict[str, Any]) -> bool:
    validator = jsonschema.Draft202012Validator(schema)
    return bool(validator.is_valid(json.loads(arguments)))


def main(folder: Path, count: int) -> int:
    """Measure every template."""
    templates = Path(os.environ["LLORCH_LLAMA_CPP_MODELS"]) / "templates"
    good = [
        measure(folder, name, (templates / f"{name}.jinja").read_text(encoding="utf-8"), count)
        for name in TEMPLATES
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200))
