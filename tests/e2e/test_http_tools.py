"""Tools, forms and thoughts as clients use them: OpenAI's own client, over a real socket, around a real
worker with a fake session.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.config import EngineConfig
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.requests import ChatMessage, ChatPrompt, GenerationRequest, ToolChoice, ToolMode
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.structured.spec import Choice
from support.builders.chat_templates import TOOLS
from support.builders.checkpoints import CHAT_TEMPLATE, EOS_ID
from support.fakes.generator import PATIENCE_S
from support.fakes.session import FakeSession
from support.harness.http import RunningFront, running_front, send
from support.harness.worker import TOKENIZER, make_session, make_worker

pytestmark = pytest.mark.usefixtures("way_at_leisure")

pytest.importorskip("llguidance")

# As QwQ's and DeepSeek R1's templates do.
OPENS_A_THOUGHT = "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
TEMPLATE = CHAT_TEMPLATE + OPENS_A_THOUGHT
QUESTION = [{"role": "user", "content": "Hi"}]
TOOL_LIST = [json.loads(tool) for tool in TOOLS]
WEATHER = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
TIME = '{"name": "get_time", "arguments": {}}'


class Served:
    """A front whose model answers every prompt with ``says``."""

    def __init__(self, front: RunningFront, session: FakeSession) -> None:
        self.front = front
        self.says = ""
        session.rule = self._rule

    def _rule(self, tokens: tuple[int, ...]) -> int | None:
        # What the model has said begins behind the prompt, which ends with the assistant's opening.
        opening = TOKENIZER.decode(tokens, keep_special_tokens=True).rpartition("assistant\n")[2]
        said = opening.removeprefix("<think>\n")
        if said == self.says:
            return EOS_ID
        if not self.says.startswith(said):
            return None
        return TOKENIZER.encode(self.says[len(said)], add_special_tokens=False)[0]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.front.base}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )

    def ask(self, says: str, **fields: Any) -> Any:
        """Return the whole answer, or every chunk of a stream."""
        self.says = says
        with self.client() as client:
            answer = client.chat.completions.create(model="tiny", messages=QUESTION, **fields)  # type: ignore[call-overload]
            return list(answer) if fields.get("stream") else answer

    def post(self, says: str, **fields: Any) -> Any:
        self.says = says
        body = {"messages": QUESTION, **fields}
        return send(self.front.port, "POST", "/v1/chat/completions", body)


@pytest.fixture(scope="module", params=[False, True], ids=["no thought", "thought"])
def thinks(request: pytest.FixtureRequest) -> bool:
    found: bool = request.param
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, thinks: bool) -> Iterator[Served]:
    session = make_session(context=1024)
    folder = tmp_path_factory.mktemp("artifact")
    config = EngineConfig(prefill_chunk=64, tool_format="hermes", reasoning_format="think")
    template = TEMPLATE if thinks else CHAT_TEMPLATE
    worker = make_worker(folder, session, config=config, template=template)
    with running_front(worker) as front:
        yield Served(front, session)
    worker.close()


@pytest.fixture(scope="module")
def thought(thinks: bool) -> str:
    """What the model writes before it answers."""
    return "Rome, {I} guess?\n</think>\n\n" if thinks else ""


class City(BaseModel):
    name: str
    people: int


def test_a_form_is_in_the_content_and_the_thought_is_not(served: Served, thought: str) -> None:
    schema = {"name": "city", "schema": City.model_json_schema()}
    form = {"type": "json_schema", "json_schema": schema}
    text = '{"name": "Rome", "people": 2}'
    message = served.ask(thought + text, response_format=form, temperature=0).choices[0].message
    assert City.model_validate_json(message.content) == City(name="Rome", people=2)
    assert getattr(message, "reasoning_content", None) == ("Rome, {I} guess?" if thought else None)
    message = served.ask(
        thought + "Yes.", response_format={"type": "json_object"}, temperature=0, max_tokens=300, seed=2
    )
    assert message.choices[0].message.content.startswith("{")


def test_a_choice_over_grpc_is_in_the_text(served: Served, thought: str) -> None:
    served.says = thought + "maybe"
    sampling = SamplingParams(temperature=0, structured=Choice(("yes", "no")))
    chat = ChatPrompt((ChatMessage("user", "Hi"),))
    with WorkerClient(served.front.rpc) as client:
        [answer] = client.complete(GenerationRequest("r", chat, sampling))
    assert answer.text in ("yes", "no")
    assert answer.reasoning == ("Rome, {I} guess?" if thought else "")


def test_a_stop_string_in_the_thought_does_not_end_it(served: Served, thought: str) -> None:
    answer = served.ask(thought + "It is a guess, no more.", stop=["guess"], temperature=0).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("It is a ", "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_required_call_is_made(served: Served, thought: str, choice: object, stream: bool) -> None:
    says = f"{thought}<tool_call>\n{WEATHER}\n</tool_call>"
    fields = {"tools": TOOL_LIST, "tool_choice": choice, "temperature": 0}
    if not stream:
        whole = served.ask(says, **fields).choices[0]
        [call] = whole.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        return
    parts, reasons, content = [], [], ""
    for chunk in served.ask(says, stream=True, **fields):
        [each] = chunk.choices
        parts += each.delta.tool_calls or []
        content += each.delta.content or ""
        reasons.append(each.finish_reason)
    first, *rest = parts
    assert (first.index, first.function.name, first.type, len(first.id)) == (0, "get_weather", "function", 9)
    # How many parts there are is a matter of who is faster.
    assert {(part.index, part.function.name, part.id) for part in rest} <= {(0, None, None)}
    arguments = first.function.arguments + "".join(part.function.arguments for part in rest)
    assert json.loads(arguments) == {"city": "Rome"}
    assert (content, reasons[-1]) == ("", "tool_calls")


def test_one_call_at_most_with_and_without_a_choice(served: Served, thought: str) -> None:
    says = f"{thought}<tool_call>\n{TIME}\n</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>"
    for choice in ("auto", "required"):
        for parallel in (True, False):
            answer = served.ask(
                says, tools=TOOL_LIST, tool_choice=choice, parallel_tool_calls=parallel, temperature=0
            ).choices[0]
            names = [call.function.name for call in answer.message.tool_calls]
            assert names == (["get_time", "get_weather"] if parallel else ["get_time"])
            assert answer.finish_reason == "tool_calls"


def test_a_call_without_arguments_is_a_call_and_may_be_sent_back(served: Served, thought: str) -> None:
    says = thought + '<tool_call>\n{"name": "get_time", "arguments": null}\n</tool_call>'
    [call] = served.ask(says, tools=TOOL_LIST, temperature=0).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_time", "{}")
    for arguments in (None, "", "null", "{}"):
        sent = {"id": call.id, "type": "function", "function": {"name": "get_time", "arguments": arguments}}
        history = [
            *QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [sent]},
            {"role": "tool", "content": "noon", "tool_call_id": call.id},
        ]
        found = served.post(thought + "Noon.", messages=history, tools=TOOL_LIST, temperature=0)
        assert found.status == 200, found.document
        assert found.document["choices"][0]["message"]["content"] == "Noon."


def test_a_call_that_breaks_off_is_told_as_text(served: Served, thought: str) -> None:
    says = thought + '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"'
    told = says.removeprefix(thought)
    whole = served.ask(says, tools=TOOL_LIST, temperature=0).choices[0]
    assert (whole.message.content, whole.message.tool_calls, whole.finish_reason) == (told, None, "stop")
    chunks = served.ask(says, tools=TOOL_LIST, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == told
    last = chunks[-1].choices[0]
    assert last.finish_reason == "stop"
    assert last.llorch["broken_tool_calls"] == [0]
    assert {"seed", "timings"} <= last.llorch.keys()


def test_what_cannot_be_called_is_refused_by_its_field(served: Served) -> None:
    for fields, param in [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOL_LIST}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"name": "f", "parameters": 3}]}, "tools[0].parameters"),
        (
            {
                "tool_choice": "required",
                "tools": [*TOOL_LIST, {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}],
            },
            "tools[2].parameters.properties.a.not",
        ),
    ]:
        found = served.post("x", **fields)
        assert (found.status, found.document["error"]["param"]) == (400, param)


def test_a_required_call_over_grpc(served: Served, thought: str) -> None:
    served.says = f"{thought}<tool_call>\n{TIME}\n</tool_call>"
    choice = ToolChoice(ToolMode.REQUIRED, ("get_time",))
    chat = ChatPrompt(
        (ChatMessage("user", "Hi"),), tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
    )
    request = GenerationRequest("r", chat, SamplingParams(temperature=0))
    with WorkerClient(served.front.rpc) as client:
        [answer] = client.complete(request)
    assert answer.completion is not None
    assert answer.completion.reason is FinishReason.TOOL_CALLS
    assert [(call.index, call.name, call.arguments) for call in answer.tool_calls] == [(0, "get_time", "{}")]


RESPONSES_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOL_LIST]
MESSAGES_TOOLS = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOL_LIST
]


def test_a_required_call_through_the_other_apis(served: Served, thought: str) -> None:
    served.says = f"{thought}<tool_call>\n{TIME}\n</tool_call>\n<tool_call>\n{TIME}\n</tool_call>"
    body = {"input": "Hi", "tools": RESPONSES_TOOLS, "tool_choice": {"type": "function", "name": "get_time"}}
    body |= {"temperature": 0, "parallel_tool_calls": False, "store": False}
    found = send(served.front.port, "POST", "/v1/responses", body)
    assert found.status == 200, found.document
    calls = [item for item in found.document["output"] if item["type"] == "function_call"]
    assert [(call["name"], call["arguments"]) for call in calls] == [("get_time", "{}")]
    body = {"max_tokens": 500, "messages": QUESTION, "tools": MESSAGES_TOOLS, "temperature": 0}
    body |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "model": "tiny"}
    found = send(served.front.port, "POST", "/v1/messages", body)
    assert found.status == 200, found.document
    blocks = [block for block in found.document["content"] if block["type"] == "tool_use"]
    assert [(block["name"], block["input"]) for block in blocks] == [("get_time", {})]
    assert found.document["stop_reason"] == "tool_use"


def test_a_call_that_breaks_off_through_the_other_apis(served: Served, thought: str) -> None:
    served.says = thought + '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"'
    told = served.says.removeprefix(thought)
    body = {"input": "Hi", "tools": RESPONSES_TOOLS, "temperature": 0, "store": False}
    found = send(served.front.port, "POST", "/v1/responses", body).document
    kinds = [item["type"] for item in found["output"] if item["type"] != "reasoning"]
    assert kinds == ["message"]
    assert found["output"][-1]["content"][0]["text"] == told
