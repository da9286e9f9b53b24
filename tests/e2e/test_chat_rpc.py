"""Chats over gRPC: tools and messages reach the template, bad fields are named, and calls and thoughts come
back apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.config import EngineConfig
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import InvalidRequestError
from llorch_serve.requests import ChatMessage, ChatPrompt, GenerationRequest, JoinedUpdates, ToolCall
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.sampling.params import SamplingParams
from support.builders.chat_templates import TOOLS
from support.builders.checkpoints import EOS_ID, write_hf_folder
from support.fakes.session import FakeSession
from support.harness.processes import llorch_here, serving
from support.harness.rpc import open_stub, running_server
from support.harness.worker import TOKENIZER, make_session, make_worker, script

SEEN = "{{ tools | tojson }}|{{ messages | tojson }}|{{ documents | tojson }}|{{ style }}"


@pytest.fixture(scope="module")
def session() -> FakeSession:
    return make_session(context=512)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, session: FakeSession) -> Iterator[str]:
    config = EngineConfig(prefill_chunk=16, tool_format="hermes", reasoning_format="think")
    worker = make_worker(tmp_path_factory.mktemp("artifact"), session, config=config)
    with running_server(worker) as server:
        yield server.address
    worker.close()


def test_calls_and_thoughts_cross_the_wire(address: str, session: FakeSession) -> None:
    chat = ChatPrompt((ChatMessage("user", "Hi"),), tools=TOOLS)
    text = '<think>hm</think>ok<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    ids = [id_ for char in text for id_ in TOKENIZER.encode(char, add_special_tokens=False)]
    request = GenerationRequest("r", chat, SamplingParams(temperature=0, max_tokens=200))
    with WorkerClient(address) as client:
        session.rule = script(client.tokenize(chat)[0], [*ids, EOS_ID])
        first, *rest = client.generate(request)
        together = JoinedUpdates(first)
        for update in rest:
            together.add(update)
        streamed = together.joined()
        [whole] = client.complete(request)
    for answer in (streamed, whole):
        assert (answer.text, answer.reasoning) == ("ok", "hm")
        [call] = answer.tool_calls
        assert (call.name, call.arguments, len(call.id)) == ("get_time", "{}", 9)
        assert answer.completion is not None
        assert answer.completion.reason is FinishReason.TOOL_CALLS
    assert streamed.tool_calls == whole.tool_calls


def test_a_worker_shows_a_template_everything(tmp_path: Path) -> None:
    source = write_hf_folder(
        tmp_path / "source",
        tokenizer_config={
            "chat_template": [
                {"name": "default", "template": "no tools"},
                {"name": "tool_use", "template": SEEN},
            ]
        },
    )
    assert llorch_here("export", source, "--output", tmp_path / "out").code == 0
    call = ToolCall("f", '{"b": 1, "a": 2.0}', "call00001")
    messages = (
        ChatMessage("user", ("Look", "here"), name="bob"),
        ChatMessage("assistant", None, tool_calls=(call,), reasoning_content="hm"),
        ChatMessage("tool", "3", tool_call_id="call00001"),
    )
    chat = ChatPrompt(messages, TOOLS, ('{"text": "d"}',), template_arguments='{"style": "brief"}')
    with serving(tmp_path / "out") as worker, WorkerClient(worker.address) as client:
        tools, seen, documents, style = client.tokenize(chat)[1].split("|")
        assert json.loads(tools) == [json.loads(tool) for tool in TOOLS]
        assert list(json.loads(seen)[1]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]
        assert json.loads(seen)[0]["content"][1] == {"type": "text", "text": "here"}
        assert "content" not in json.loads(seen)[1]
        assert (json.loads(documents), style) == ([{"text": "d"}], "brief")
        assert client.tokenize(ChatPrompt(messages))[1] == "no tools"
        with pytest.raises(InvalidRequestError, match=r"input\.chat\.tools\[0\]: is not JSON"):
            client.tokenize(ChatPrompt(messages, tools=("{",)))


def test_content_is_given_once(address: str) -> None:
    both = pb.ChatMessage(role="user", content="a", content_parts=["b"])
    message = pb.TokenizeRequest(input=pb.Input(chat=pb.ChatInput(messages=[both])))
    with open_stub(address) as stub, pytest.raises(Exception, match="expected one of the two"):
        stub.Tokenize(message)


def test_generate_takes_a_file_of_tools(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(f"[{', '.join(TOOLS)}]")
    flags = ("--chat", "Hi", "--system", "Be brief.", "--max-tokens", "4", "--json")
    found = llorch_here("generate", tiny, *flags, "--tools", path, "--template-arguments", '{"x": 1}')
    assert found.code == 0, found
    flags = (*flags, "--tools", path)
    found = llorch_here("generate", tiny, *flags, "--tool-format", "hermes", "--tool-choice", "get_time")
    assert found.code == 0, found
    assert '"<tool_call>'.startswith(f'"{json.loads(found.stdout)["text"]}')  # as far as four tokens go
    refused = llorch_here("generate", tiny, *flags, "--tool-format", "hermes", "--tool-choice", "x")
    assert "input.chat.tool_choice: found 'x'" in refused.error()
    refused = llorch_here("generate", tiny, *flags, "--tool-choice", "required")
    assert "--tool-format" in refused.error()
    refused = llorch_here("generate", tiny, "--chat", "Hi", "--tool-choice", "required")
    assert "--tool-choice has no effect without --tools" in refused.error()
    flags = flags[:-2]
    path.write_text("{}")
    assert "holds no JSON list" in llorch_here("generate", tiny, *flags, "--tools", path).error()
    assert "cannot be read" in llorch_here("generate", tiny, *flags, "--tools", tmp_path / "absent").error()
    refused = llorch_here("generate", tiny, "--prompt", "Hi", "--system", "x")
    assert "--system has no effect without --chat" in refused.error()
    refused = llorch_here("generate", tiny, "--chat", "Hi", "--tool-format", "x")
    assert "--tool-format is 'x'; expected one of auto, none" in refused.error()
