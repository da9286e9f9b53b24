"""Rendered and encoded chats are those of transformers, character by character and id by id."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from chat_templates import CONVERSATIONS, TEMPLATES
from llorch_serve.chat import ChatTemplate, encode_chat
from llorch_serve.requests import ChatMessage
from llorch_serve.text import Tokenizer
from tiny_tokenizers import BUILDERS, byte_level

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.reference


def as_dicts(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    return [{"role": m.role, "content": m.content} for m in messages]


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


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", list(CONVERSATIONS))
@pytest.mark.parametrize("template", list(TEMPLATES))
def test_rendering_equals_transformers(template: str, name: str, prompt: bool) -> None:
    source = TEMPLATES[template]
    messages = CONVERSATIONS[name]
    [expected], _ = transformers.utils.chat_template_utils.render_jinja_template(
        conversations=[as_dicts(messages)],
        chat_template=source,
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    rendered = ChatTemplate(source, "<s>", "</s>", now=lambda: datetime(2024, 7, 26)).render(messages, prompt)
    assert rendered == expected


@pytest.mark.parametrize("kind", list(BUILDERS))
@pytest.mark.parametrize("name", list(CONVERSATIONS))
@pytest.mark.parametrize("template", ["smollm2", "llama2", "llama3"])
def test_ids_equal_transformers(template: str, name: str, kind: str) -> None:
    build = BUILDERS[kind]
    inner = byte_level(("<|im_start|>", "<|im_end|>", "<s>", "</s>")) if kind == "byte_level" else build()
    source = TEMPLATES[template]
    expected = wrapped(inner, source).apply_chat_template(
        as_dicts(CONVERSATIONS[name]), add_generation_prompt=True, return_dict=False
    )
    mine = ChatTemplate(source, "<s>", "</s>", now=lambda: datetime(2024, 7, 26))
    ids, _ = encode_chat(Tokenizer(inner), mine, CONVERSATIONS[name])
    assert list(ids) == expected
