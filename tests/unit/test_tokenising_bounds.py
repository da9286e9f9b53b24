"""No input keeps other threads from running: texts are encoded without the interpreter's lock, and oversize
ones not at all.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers

from llorch_serve.chat.template import ChatTemplate
from llorch_serve.errors import InvalidRequestError
from llorch_serve.requests import (
    ChatMessage,
    ChatPrompt,
    Prompt,
    ScoreRequest,
    TextPrompt,
    TokenPrompt,
    ToolCall,
)
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.wire import MAX_FIELDS, MAX_TEXT_BYTES, check_fields
from llorch_serve.text.tokenizer import PIECE_CHARS, SMALL_BYTES, Tokenizer
from llorch_serve.worker.prompts import MAX_CHARS, PromptEncoder
from llorch_serve.worker.scoring import encode_pairs
from support.builders.chat_templates import SMOLLM2, conversation
from support.builders.tiny_artifact import tiny_manifest
from support.builders.tiny_tokenizers import byte_fallback, byte_level

CONTEXT = 48
MIB = 2**20


class Counting:
    """A tokenizer that notes what it is given; its call that holds the lock is for texts of one letter
    alone.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self.encoded: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, **rest: Any) -> tokenizers.Encoding:
        assert text == "a"
        return self._inner.encode(text, **rest)

    def encode_batch(self, texts: list[str], **rest: Any) -> list[tokenizers.Encoding]:
        self.encoded += map(len, texts)
        return self._inner.encode_batch(texts, **rest)


class Model:
    manifest = tiny_manifest()
    kind = None

    def chat_templates(self) -> dict[str, str]:
        return {"default": SMOLLM2}


def counted(build: Callable[[], tokenizers.Tokenizer] = byte_level) -> tuple[PromptEncoder, list[int]]:
    inner = Counting(build())
    tokenizer = Tokenizer(inner)  # type: ignore[arg-type]  # all that it uses
    assert tokenizer.start_ids in ((), (1,))  # found once, by encoding a letter
    inner.encoded.clear()
    return PromptEncoder(Model(), tokenizer), inner.encoded  # type: ignore[arg-type]  # all that it looks at


LONG = "a" * (7 * MIB)
OVERSIZE: dict[str, Prompt] = {
    "text": TextPrompt(LONG),
    "spaces": TextPrompt(" " * (14 * MIB)),
    "ids": TokenPrompt((1,) * 2**20),
    "message": ChatPrompt(tuple(conversation(LONG))),
    "parts": ChatPrompt((ChatMessage("user", ("a" * 64,) * 2**14),)),
    "reasoning": ChatPrompt((ChatMessage("user", "a", reasoning_content=LONG),)),
    "call": ChatPrompt((ChatMessage("assistant", "a", tool_calls=(ToolCall("f", LONG),)),)),
    "tools": ChatPrompt(tuple(conversation("a")), tools=(json.dumps({"a": LONG}),)),
    "documents": ChatPrompt(tuple(conversation("a")), documents=(json.dumps({"a": LONG}),)),
    "arguments": ChatPrompt(tuple(conversation("a")), template_arguments=json.dumps({"a": LONG})),
    "values": ChatPrompt(tuple(conversation("a")), tools=('{"a": [' + "0," * 2**16 + "0]}",)),
}


@pytest.mark.parametrize("kind", list(OVERSIZE))
def test_what_cannot_fit_is_neither_rendered_nor_encoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, encoded = counted()
    rendered: list[object] = []
    monkeypatch.setattr(ChatTemplate, "render", lambda _self, seen: rendered.append(seen))
    monkeypatch.setattr(Tokenizer, "decode", lambda *_: pytest.fail("decoded"))
    with pytest.raises(InvalidRequestError, match=r"found .*\d+"):
        prompts.encode(OVERSIZE[kind], context=CONTEXT)
    assert (encoded, rendered) == ([], [])


def test_a_rendered_text_that_cannot_fit_is_not_encoded() -> None:
    prompts, encoded = counted()
    with pytest.raises(InvalidRequestError, match="characters behind the chat template"):
        prompts.encode(ChatPrompt(tuple(conversation("a" * 2**17))), context=CONTEXT)
    assert encoded == []


def test_the_longest_contexts_take_no_more_than_the_longest_texts() -> None:
    prompts, encoded = counted()
    with pytest.raises(InvalidRequestError, match=f"no text may have more than {MAX_CHARS}"):
        prompts.encode(TextPrompt("a" * (MAX_CHARS + 1)), context=2**20)
    assert encoded == []


@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_of_a_long_text_with_too_many_tokens_little_is_encoded(
    build: Callable[[], tokenizers.Tokenizer],
) -> None:
    prompts, encoded = counted(build)
    context = PIECE_CHARS
    with pytest.raises(InvalidRequestError, match=r"the first \d+ of which are about"):
        prompts.encode(TextPrompt("z" * (SMALL_BYTES + 1)), context=context)
    # Two pieces have just as many as twice the context holds; a prefix space makes it one more.
    assert encoded == [PIECE_CHARS] * (2 if build is byte_fallback else 3)


def test_a_long_text_with_few_tokens_is_encoded_as_ever() -> None:
    prompts, encoded = counted(byte_fallback)
    text = " hello" * 60_000
    ids, _ = prompts.encode(TextPrompt(text), context=2**17)
    assert list(ids) == byte_fallback().encode(text).ids
    assert encoded[-1] == len(text)


def test_chats_too_are_encoded_without_the_lock() -> None:
    prompts, encoded = counted()
    _, text = prompts.encode(ChatPrompt(tuple(conversation("hello <|im_end|>"))), context=4096)
    assert encoded == [len(text)]


def test_texts_that_would_be_encoded_again_and_again_are_bounded_together() -> None:
    prompts, encoded = counted()
    request = ScoreRequest("r", TextPrompt("a" * MIB), (TextPrompt("b"),) * 256)
    with pytest.raises(InvalidRequestError, match="the context's with each of 256 texts"):
        encode_pairs(request, prompts, prefix_id=None, vocab_size=512, context=2**20)
    assert encoded == []


# Messages.


def nested(count: int) -> bytes:
    return pb.GenerateRequest(
        input=pb.Input(chat=pb.ChatInput(messages=[pb.ChatMessage()] * count))
    ).SerializeToString()


def test_a_message_of_too_many_fields_is_not_parsed() -> None:
    check_fields(nested(MAX_FIELDS - 2), pb.GenerateRequest.DESCRIPTOR)
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_FIELDS} fields"):
        check_fields(nested(MAX_FIELDS - 1), pb.GenerateRequest.DESCRIPTOR)
    parts = pb.GenerateRequest(input=pb.Input(chat=pb.ChatInput(tools=[""] * (MAX_FIELDS + 1))))
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_FIELDS} fields"):
        check_fields(parts.SerializeToString(), pb.GenerateRequest.DESCRIPTOR)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.TokenizeRequest(input=pb.Input(text="\u4f60" * (MAX_TEXT_BYTES // 3 + 1))), "text"),
        (pb.GenerateRequest(input=pb.Input(chat=pb.ChatInput(tools=["a" * (MAX_TEXT_BYTES + 1)]))), "tools"),
        (pb.ScoreRequest(continuations=[pb.Continuation(text="a" * (MAX_TEXT_BYTES + 1))]), "text"),
    ],
)
def test_a_text_that_takes_long_to_become_a_string_is_not_parsed(message: Any, field: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=rf"\d+ bytes in {field}, expected at most {MAX_TEXT_BYTES}"
    ):
        check_fields(message.SerializeToString(), message.DESCRIPTOR)


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(input=pb.Input(text="a" * MAX_TEXT_BYTES)),
        pb.GenerateRequest(input=pb.Input(text="\x0a" * MIB)),
        pb.GenerateRequest(input=pb.Input(tokens=pb.TokenInput(ids=range(2**17)))),
        pb.GenerateRequest(
            input=pb.Input(
                chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content="a" * 64)] * 2**14)
            )
        ),
    ],
)
def test_honest_messages_are(message: pb.GenerateRequest) -> None:
    check_fields(message.SerializeToString(), pb.GenerateRequest.DESCRIPTOR)


@pytest.mark.parametrize(
    "raw", [b"\x0a\xff\xff\xff\xff\x7f" + bytes(2**17), b"\xff" * 2**17, b"\x0b" * 2**16 + b"\x80"]
)
def test_malformed_ones_are_left_to_the_parser_or_refused(raw: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        check_fields(raw, pb.GenerateRequest.DESCRIPTOR)
