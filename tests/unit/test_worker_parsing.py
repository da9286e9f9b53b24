"""Answers to chats come with calls and thoughts apart; other answers, and those of a worker told not to, are
their text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llorch_serve.config import EngineConfig
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.requests import ChatMessage, ChatPrompt, Prompt, TokenPrompt, whole_calls
from llorch_serve.text.tokenizer import TextStream, Tokenizer
from llorch_serve.worker.prompts import PromptEncoder
from llorch_serve.worker.worker import Worker
from support.builders.chat_templates import TOOLS
from support.builders.checkpoints import EOS_ID
from support.builders.tiny_artifact import tiny_manifest
from support.builders.tiny_tokenizers import byte_level
from support.fakes.session import FakeSession
from support.harness.worker import TOKENIZER, Answer, ask, make_session, make_worker, script

CALL = '{"name": "get_time", "arguments": {"zone": "utc"}}'
ANSWER = f"<think>hm</think>ok <tool_call>{CALL}</tool_call>"
CHAT = ChatPrompt((ChatMessage("user", "Hi"),), tools=TOOLS)


@pytest.fixture(scope="module")
def session() -> FakeSession:
    return make_session(context=512)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, session: FakeSession) -> Iterator[Worker]:
    config = EngineConfig(prefill_chunk=16, tool_format="hermes", reasoning_format="think")
    made = make_worker(tmp_path_factory.mktemp("artifact"), session, config=config)
    yield made
    made.close()


def answer(
    worker: Worker, session: FakeSession, prompt: Prompt, text: str, *, stop: tuple[str, ...] = ()
) -> Answer:
    """Let the model answer with a text and end; one token a character."""
    ids = [id_ for char in text for id_ in TOKENIZER.encode(char, add_special_tokens=False)]
    session.rule = script(worker.tokenize(prompt)[0], [*ids, EOS_ID])
    found = ask(worker, prompt, max_tokens=len(ids) + 5, stop=stop)
    if not stop:
        assert found.ids == ids
    return found


def test_a_chat_with_tools_has_its_parts_apart(worker: Worker, session: FakeSession) -> None:
    found = answer(worker, session, CHAT, ANSWER)
    assert found.text == "ok "
    assert "".join(update.reasoning for update in found.updates) == "hm"
    [call] = whole_calls(call for update in found.updates for call in update.tool_calls)
    assert (call.index, call.name, call.arguments) == (0, "get_time", '{"zone": "utc"}')
    assert found.completion.reason is FinishReason.TOOL_CALLS
    assert found.completion.stop_matched == "<|eos|>"


def test_what_is_held_back_comes_at_the_end(worker: Worker, session: FakeSession) -> None:
    found = answer(worker, session, CHAT, "ok <tool_call>{")
    assert (found.text, found.completion.reason) == ("ok <tool_call>{", FinishReason.STOP)


def test_text_behind_a_call_makes_it_no_end_with_calls(worker: Worker, session: FakeSession) -> None:
    found = answer(worker, session, CHAT, f"<tool_call>{CALL}</tool_call>so")
    assert (found.text, found.completion.reason) == ("so", FinishReason.STOP)


def test_a_limit_stays_a_limit(worker: Worker, session: FakeSession) -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    session.rule = script(
        worker.tokenize(CHAT)[0], [TOKENIZER.encode(c, add_special_tokens=False)[0] for c in text]
    )
    found = ask(worker, CHAT, max_tokens=len(text))
    assert found.text == ""
    assert found.completion.reason is FinishReason.LENGTH


def test_stop_strings_look_at_the_text_as_it_is_generated(worker: Worker, session: FakeSession) -> None:
    found = answer(worker, session, CHAT, ANSWER, stop=("</think>",))
    assert (found.text, found.completion.stop_matched) == ("", "</think>")
    assert "".join(update.reasoning for update in found.updates) == "hm"


def test_without_tools_there_are_no_calls(worker: Worker, session: FakeSession) -> None:
    found = answer(worker, session, ChatPrompt(CHAT.messages), ANSWER)
    assert found.text == f"ok <tool_call>{CALL}</tool_call>"


@pytest.mark.parametrize("tokens", [False, True])
def test_other_prompts_and_other_workers_give_the_text(
    tmp_path: Path, worker: Worker, session: FakeSession, tokens: bool
) -> None:
    if tokens:
        assert answer(worker, session, TokenPrompt((40, 41)), ANSWER).text == ANSWER
        return
    mute = make_session(context=512)
    plain = make_worker(tmp_path, mute)  # the tiny template has no format
    assert answer(plain, mute, CHAT, ANSWER).text == ANSWER
    plain.close()


class Granite:
    """A model whose markers are special tokens."""

    manifest = tiny_manifest()

    @staticmethod
    def chat_templates() -> dict[str, str]:
        return {"default": "<|start_of_role|><|tool_call|></think>"}


def test_markers_that_are_special_tokens_are_seen_and_others_are_not() -> None:
    tokenizer = Tokenizer(byte_level(("<|tool_call|>", "<|end_of_text|>")))
    prompts = PromptEncoder(Granite(), tokenizer)  # type: ignore[arg-type]  # all that it looks at
    kept = prompts.kept_tokens(CHAT)
    assert [tokenizer.special_tokens[id_] for id_ in kept] == ["<|tool_call|>"]
    assert prompts.kept_tokens(ChatPrompt(CHAT.messages)) == frozenset()
    stream = TextStream(tokenizer, kept=kept)
    parser = prompts.parser(CHAT, "", key="k")
    assert parser is not None
    ids = tokenizer.encode(f"<|tool_call|>[{CALL}]<|end_of_text|>", add_special_tokens=False)
    deltas = [parser.push(stream.push(id_)[0]) for id_ in ids]
    calls = whole_calls(call for delta in deltas for call in delta.tool_calls)
    assert [call.name for call in calls] == ["get_time"]
    assert parser.push(stream.finish()).text + parser.finish().text == ""
