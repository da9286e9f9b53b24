"""Three APIs, one answer: what the vendors' streaming helpers put together of /v1/responses and /v1/messages
is what /v1/chat/completions says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import anthropic
import openai
import pytest

from llorch_serve.artifact.folder import Artifact
from llorch_serve.calls.callers import Caller
from llorch_serve.config import EngineConfig
from llorch_serve.http.openai_requests import read_chat
from llorch_serve.http.prompt_bodies import prompt_of
from llorch_serve.loading.worker import load_worker
from llorch_serve.requests import ChatPrompt
from llorch_serve.runtime.session import DecoderSession
from llorch_serve.worker.prompts import PromptEncoder
from llorch_serve.worker.worker import Worker
from support.builders.api_conversations import Conversation, conversation
from support.builders.checkpoints import EOS_ID
from support.builders.tiny_artifact import tiny_manifest, write_tiny_artifact
from support.fakes.session import FakeSession
from support.harness.http import running_front
from support.harness.worker import TOKENIZER, make_session, script

COUNT = 50
LIMIT = 400
NOBODY = Caller("", client="", correlation_id="")
# Everything that a template can see of a conversation, so that one that got lost would change the prompt.
TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.type }}{{ t.function.name }}{{ t.function.description }}"
    "{{ t.function.parameters | length }}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.reasoning_content or '' }}|{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.id }}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{{ m.tool_call_id or '' }}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@dataclass(frozen=True)
class Answer:
    """What came back, in no API's words. calls: name and arguments. prompt: tokens, cached or not."""

    text: str
    thought: str
    calls: tuple[tuple[str, Any], ...]
    prompt: int
    generated: int


class Clients:
    """Both vendors' clients of one worker."""

    def __init__(self, base: str, model: str, limit: int, stack: ExitStack) -> None:
        self._openai = stack.enter_context(
            openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
        )
        self._anthropic = stack.enter_context(
            anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
        )
        self._model, self._limit = model, limit

    def chat(self, sent: Conversation) -> Answer:
        answer = self._openai.chat.completions.create(
            model=self._model, max_completion_tokens=self._limit, temperature=0, **sent.chat()
        )
        message, usage = answer.choices[0].message, answer.usage
        calls = tuple(
            (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()
        )
        thought = getattr(message, "reasoning_content", None) or ""
        return Answer(message.content or "", thought, calls, usage.prompt_tokens, usage.completion_tokens)

    def responses(self, sent: Conversation) -> Answer:
        body = sent.responses()
        with self._openai.responses.stream(
            model=self._model, max_output_tokens=self._limit, temperature=0, **body
        ) as stream:
            *_, event = stream  # the helper's own final response is for answers that ran to their end
            last = event.response
        calls = tuple(
            (item.name, json.loads(item.arguments)) for item in last.output if item.type == "function_call"
        )
        thought = "".join(
            part.text for item in last.output if item.type == "reasoning" for part in item.content
        )
        usage = last.usage
        return Answer(last.output_text, thought, calls, usage.input_tokens, usage.output_tokens)

    def messages(self, sent: Conversation) -> Answer:
        with self._anthropic.messages.stream(
            model=self._model, max_tokens=self._limit, extra_body={"temperature": 0}, **sent.messages()
        ) as stream:
            last = stream.get_final_message()
        calls = tuple((block.name, block.input) for block in last.content if block.type == "tool_use")
        text = "".join(block.text for block in last.content if block.type == "text")
        thought = "".join(block.thinking for block in last.content if block.type == "thinking")
        usage = last.usage
        prompt = usage.input_tokens + usage.cache_read_input_tokens
        return Answer(text, thought, calls, prompt, usage.output_tokens)


@pytest.fixture
def session() -> FakeSession:
    return make_session(context=1024)


@pytest.fixture
def worker(tmp_path: Path, session: FakeSession) -> Iterator[Worker]:
    folder = write_tiny_artifact(tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    artifact = Artifact(folder=folder, manifest=tiny_manifest())
    prompts = PromptEncoder(artifact, TOKENIZER, tool_format="hermes", reasoning_format="think")
    made = Worker(artifact, cast("DecoderSession", session), prompts, EngineConfig(prefill_chunk=256))
    yield made
    made.close()


def test_fifty_conversations_get_the_same_answer_through_three_apis(
    worker: Worker, session: FakeSession
) -> None:
    submit, prompts = worker.submit, []

    def noted(request: Any, sink: Any) -> Any:
        prompts.append(request.prompt)
        return submit(request, sink)

    worker.submit = noted  # type: ignore[method-assign]
    with running_front(worker) as front, ExitStack() as stack:
        clients = Clients(front.base, "tiny", LIMIT, stack)
        for number in range(COUNT):
            sent = conversation(number)
            session.rule = _saying(worker, sent)
            whole = clients.chat(sent)
            assert clients.responses(sent) == whole, number
            assert clients.messages(sent) == whole, number
            first, *others = prompts[-3:]
            assert [_plain(other) for other in others] == [_plain(first)] * 2, number
            assert whole.generated < LIMIT, "the answer did not end as it was to"


def _plain(prompt: ChatPrompt) -> Any:
    """Return a prompt with arguments as objects: their spaces are each client's own."""
    calls = [
        (call.name, json.loads(call.arguments), call.id)
        for message in prompt.messages
        for call in message.tool_calls
    ]
    messages = [
        (message.role, message.content, message.reasoning_content, message.tool_call_id)
        for message in prompt.messages
    ]
    return messages, calls, [json.loads(tool) for tool in prompt.tools]


def _saying(worker: Worker, sent: Conversation) -> Callable[[tuple[int, ...]], int | None]:
    """Return the rule by which the model answers a conversation as it is to."""
    plan = read_chat(json.dumps(sent.chat()).encode(), worker.model_info(), NOBODY)
    ids = [id_ for char in sent.answer for id_ in TOKENIZER.encode(char, add_special_tokens=False)]
    return script(worker.tokenize(prompt_of(plan))[0], [*ids, EOS_ID])


@pytest.mark.slow
@pytest.mark.real_model
def test_fifty_conversations_with_a_real_model(smollm2: Callable[..., Path]) -> None:
    # A cache in int8 holds what is reused rounded, which is no part of what is compared.
    real = load_worker(smollm2("int8"), EngineConfig(prefix_cache=False), lambda _: None)
    try:
        with running_front(real) as front, ExitStack() as stack:
            clients = Clients(front.base, real.model_info().model_id, 32, stack)
            for number in range(COUNT):
                sent = conversation(number, tools=False)
                whole = clients.chat(sent)
                assert clients.responses(sent) == whole, number
                assert clients.messages(sent) == whole, number
    finally:
        real.close()
