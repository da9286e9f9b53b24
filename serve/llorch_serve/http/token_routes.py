"""POST /tokenize and /detokenize: a text or a conversation as the ids that the model is given, and back.

Input: bodies in the shapes that vLLM's have. Output: ids, how many there are, and how many fit.
"""

from __future__ import annotations

from typing import Any

import msgspec

from llorch_serve.calls.callers import Caller
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.http.fields import read_struct
from llorch_serve.http.openai_requests import check_model
from llorch_serve.http.prompt_bodies import ConversationBody, choose_one, own_name, read_conversation
from llorch_serve.requests import ModelInfo, Prompt, TextGenerator, TextPrompt


class TokenizeBody(ConversationBody, kw_only=True):
    """POST /tokenize. prompt: a text, or messages. add_special_tokens: of a text, true if absent; a template
    writes those of a conversation. return_token_strs: the text of each token, too.
    """

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize. keep_special_tokens: beyond vLLM's, which keeps them."""

    tokens: list[int]
    model: str | None = None
    keep_special_tokens: bool = True


def tokenize(raw: bytes, generator: TextGenerator, info: ModelInfo, caller: Caller) -> dict[str, Any]:
    """Return the ids of a text or conversation. Raises InvalidRequestError or ModelMismatchError."""
    body = read_struct(raw, TokenizeBody, ignorable=False)
    choose_one(body, "prompt", body.prompt)
    prompt: Prompt
    if body.prompt is not None:
        check_model(body.model, info)
        prompt = TextPrompt(body.prompt, body.add_special_tokens is not False)
    else:
        if body.add_special_tokens:
            found = "found true beside messages, whose template writes them; leave it out"
            raise InvalidRequestError([FieldViolation("add_special_tokens", found)])
        prompt = read_conversation(body, info, caller)
    try:
        ids, _ = generator.tokenize(prompt)
    except InvalidRequestError as error:
        raise error.renamed(lambda name: own_name(name, "prompt")) from error
    strings = body.return_token_strs
    texts = [generator.detokenize((id_,), keep_special_tokens=True) for id_ in (ids if strings else ())]
    return {
        "count": len(ids),
        "max_model_len": info.context_length,
        "tokens": ids,
        "token_strs": texts if strings else None,
    }


def detokenize(raw: bytes, generator: TextGenerator, info: ModelInfo, _caller: Caller) -> dict[str, Any]:
    """Return the text of ids. Raises InvalidRequestError or ModelMismatchError."""
    body = read_struct(raw, DetokenizeBody, ignorable=False)
    check_model(body.model, info)
    if body.tokens and min(body.tokens) < 0:
        found = f"found {min(body.tokens)}, expected ids from 0 to {info.vocab_size - 1}"
        raise InvalidRequestError([FieldViolation("tokens", found)])
    try:
        text = generator.detokenize(tuple(body.tokens), keep_special_tokens=body.keep_special_tokens)
    except InvalidRequestError as error:
        raise error.renamed(lambda name: name.replace("token_ids", "tokens", 1)) from error
    return {"prompt": text}
