"""Rendered and encoded chats are those of transformers, character by character and id by id, or both refuse.

Templates: Llama 2 and 3 from their published formats, SmolLM2's, and all that ship in
``vendor/llama.cpp/models/templates`` of the llama-cpp-python 0.3.16 source package;
``LLORCH_LLAMA_CPP_MODELS`` names that folder's parent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest

from llorch_export.checkpoint.gguf_header import read_header
from llorch_export.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from llorch_serve.chat.template import ChatTemplate
from llorch_serve.errors import InvalidRequestError
from llorch_serve.requests import ChatMessage
from llorch_serve.text.tokenizer import Tokenizer
from support.builders.chat_templates import (
    CONVERSATIONS,
    DOCUMENTS,
    TEMPLATES,
    TOOL_CONVERSATIONS,
    TOOLS,
    encoded,
    rendered,
)
from support.builders.tiny_tokenizers import BUILDERS, byte_level

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.reference

SHIPPED = sorted(Path(os.environ.get("LLORCH_LLAMA_CPP_MODELS", "/dev/null")).glob("templates/*.jinja"))
SOURCES = TEMPLATES | {path.stem: path.read_text(encoding="utf-8") for path in SHIPPED}
ALL = {**CONVERSATIONS, **TOOL_CONVERSATIONS}
ARGUMENTS = json.dumps(
    {"enable_thinking": False, "thinking": True, "date_string": "1 May 2025", "reasoning_effort": "high"}
    | {"controls": {"citations": [1, 2.5, None]}, "datetime": "Friday", "functions": "[]"}
)
# What a conversation comes with, as fields of a ChatPrompt.
FIELDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "tools": {"tools": TOOLS},
    "documents": {"documents": DOCUMENTS},
    "both": {"tools": TOOLS, "documents": DOCUMENTS},
    "arguments": {"template_arguments": ARGUMENTS, "tools": TOOLS},
    "no generation prompt": {"template_arguments": '{"add_generation_prompt": false}'},
    "continued": {"continue_final_message": True},
}


def as_dicts(messages: Sequence[ChatMessage], *, text_arguments: bool) -> list[dict[str, Any]]:
    """The messages as a caller of transformers writes them; it takes calls' arguments as objects or as
    text.
    """
    made = []
    for m in messages:
        content: Any = m.content
        if isinstance(content, tuple):
            content = [{"type": "text", "text": part} for part in content]
        calls = [
            {"id": c.id, "type": "function"}
            | {
                "function": {
                    "name": c.name,
                    "arguments": c.arguments if text_arguments else json.loads(c.arguments),
                }
            }
            for c in m.tool_calls
        ]
        made.append(
            {
                "role": m.role,
                "content": content,
                "name": m.name,
                "tool_calls": calls or None,
                "tool_call_id": m.tool_call_id,
                "reasoning_content": m.reasoning_content,
            }
        )
    return made


def oracle(
    source: str, messages: Sequence[ChatMessage], fields: dict[str, Any], *, tells_none: bool = False
) -> str | Exception:
    """What transformers renders, or how it refuses; objects where the template takes them, else text.

    tells_none: the template is told that an answer has no content, which transformers otherwise does not.
    """
    arguments = json.loads(fields.get("template_arguments", "{}"))
    going_on = fields.get("continue_final_message", False)
    given = {
        "add_generation_prompt": not going_on,
        "continue_final_message": going_on,
        "tools": [json.loads(tool) for tool in fields.get("tools", ())] or None,
        "documents": [json.loads(document) for document in fields.get("documents", ())] or None,
        "bos_token": "<s>",
        "eos_token": "</s>",
        **arguments,
    }

    def render(text_arguments: bool) -> str | Exception:
        chat = transformers.utils.chat_template_utils._normalize_chat_messages(
            as_dicts(messages, text_arguments=text_arguments)
        )
        if tells_none:
            chat = [{"content": None} | message for message in chat]
        try:
            [text], _ = transformers.utils.chat_template_utils.render_jinja_template(
                conversations=[chat], chat_template=source, **given
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
            return error
        assert isinstance(text, str)
        return text

    found = render(text_arguments=False)
    return render(text_arguments=True) if isinstance(found, TypeError) else found


def with_content(message: ChatMessage) -> ChatMessage:
    """The message, with an empty text where an answer has no content."""
    lacks = message.content is None and message.role in ("assistant", "tool")
    return replace(message, content="") if lacks else message


def silent_calls(messages: Sequence[ChatMessage]) -> list[str]:
    return [call.name for message in messages if not message.content for call in message.tool_calls]


def wrapped(inner: Any, source: str) -> Any:
    # Not named after a model, so that transformers adds no conversion of its own.
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=source, bos_token="<s>", eos_token="</s>", unk_token=None
    )


@pytest.fixture(autouse=True)
def same_day(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        @staticmethod
        def now() -> datetime:
            return datetime(2024, 7, 26)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)


def mine(source: str) -> ChatTemplate:
    return ChatTemplate(source, "<s>", "</s>", now=lambda: datetime(2024, 7, 26))


@pytest.mark.parametrize("fields", list(FIELDS))
@pytest.mark.parametrize("template", list(SOURCES))
def test_rendering_equals_transformers_or_both_refuse(template: str, fields: str) -> None:
    source, given = SOURCES[template], FIELDS[fields]
    ours = mine(source)
    for name, messages in ALL.items():
        expected = oracle(source, messages, given)
        if isinstance(expected, (jinja2.UndefinedError, TypeError)):
            # What takes no answer without content is given an empty text.
            expected = oracle(source, [with_content(message) for message in messages], given)
        if isinstance(expected, str) and not all(name in expected for name in silent_calls(messages)):
            # Some write calls only where they are told that there is no content.
            silent = [replace(m, content=m.content or None) if m.tool_calls else m for m in messages]
            told = oracle(source, silent, given, tells_none=True)
            if isinstance(told, str) and all(name in told for name in silent_calls(messages)):
                expected = told
        if isinstance(expected, str):
            assert rendered(ours, messages, **given) == expected, name
            continue
        with pytest.raises(InvalidRequestError) as caught:
            rendered(ours, messages, **given)
        if isinstance(expected, jinja2.TemplateError):
            assert " ".join(str(expected).split())[:400] in str(caught.value), name


@pytest.mark.parametrize("template", list(SOURCES))
def test_developers_speak_as_the_system_unless_the_template_knows_them(template: str) -> None:
    source = SOURCES[template]
    tokenizer, ours = Tokenizer(byte_level()), mine(source)

    def said_by(role: str) -> list[ChatMessage]:
        return [ChatMessage(role, "The marked words."), ChatMessage("user", "Hello")]

    known = ("developer", "system") if "developer" in source else ("system",)  # the word may be elsewhere
    for role in known:
        expected = oracle(source, said_by(role), {})
        if isinstance(expected, str) and "The marked words." in expected:
            assert encoded(tokenizer, ours, said_by("developer"))[1] == expected
            return
    with pytest.raises(InvalidRequestError):
        encoded(tokenizer, ours, said_by("developer"))


@pytest.mark.skipif(not SHIPPED, reason="LLORCH_LLAMA_CPP_MODELS does not name llama.cpp's models folder")
def test_every_shipped_template_renders_something() -> None:
    assert len(SHIPPED) == 25
    for path in SHIPPED:
        cases = [(chat, FIELDS[name]) for chat in ALL.values() for name in ("nothing", "arguments")]
        assert any(isinstance(oracle(SOURCES[path.stem], *case), str) for case in cases), path.stem


@pytest.mark.skipif(not SHIPPED, reason="LLORCH_LLAMA_CPP_MODELS does not name llama.cpp's models folder")
def test_llama_3_gets_one_bos_in_chats_and_in_raw_prompts() -> None:
    path = SHIPPED[0].parents[1] / "ggml-vocab-llama-bpe.gguf"
    assets = tokenizer_from_gguf(read_header(path).metadata, vocab_size=2**20, origin=path.name)
    tokenizer = Tokenizer.from_json(assets.tokenizer_json, origin=path.name)
    assert assets.bos_token_id == 128000
    bos = tokenizer.token_text(128000)
    template = ChatTemplate(SOURCES["meta-llama-Llama-3.1-8B-Instruct"], bos, "<|eot_id|>")
    chats = [encoded(tokenizer, template, chat)[0] for chat in CONVERSATIONS.values()]
    texts = ["Hello", f"{bos}Hello", f"{bos}{bos}Hello"]
    raw = [tokenizer.started(tokenizer.encode(text, add_special_tokens=True)) for text in texts]
    for ids in (*chats, *raw):
        assert (ids[0], ids.count(128000)) == (128000, 1)


@pytest.mark.real_model
def test_smollm2s_template_is_the_one_in_its_file(smollm2_gguf: Path) -> None:
    assert read_header(smollm2_gguf).metadata["tokenizer.chat_template"] == TEMPLATES["smollm2"]


@pytest.mark.parametrize("kind", list(BUILDERS))
@pytest.mark.parametrize("name", list(CONVERSATIONS))
@pytest.mark.parametrize("template", ["smollm2", "llama2", "llama3"])
def test_ids_equal_transformers_but_for_the_bos_it_leaves_out(template: str, name: str, kind: str) -> None:
    build = BUILDERS[kind]
    inner = byte_level(("<|im_start|>", "<|im_end|>", "<s>", "</s>")) if kind == "byte_level" else build()
    source = TEMPLATES[template]
    expected = wrapped(inner, source).apply_chat_template(
        as_dicts(CONVERSATIONS[name], text_arguments=False), add_generation_prompt=True, return_dict=False
    )
    tokenizer = Tokenizer(inner)
    ids, _ = encoded(tokenizer, mine(source), CONVERSATIONS[name])
    missing = [] if tuple(expected[:1]) == tokenizer.start_ids else list(tokenizer.start_ids)
    assert list(ids) == missing + expected
