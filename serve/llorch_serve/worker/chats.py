"""Conversations with one model: the templates that render them, and the formats that it answers them in.

:class:`llorch_serve.worker.prompts.PromptEncoder` imports this where conversations come, since the template
engine and the guard of control tokens take a tenth of a second, which no plain text needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from llorch_serve.chat.parsing.answer import AnswerParser, expected_thought, held_form, parser_for
from llorch_serve.chat.parsing.reasoning import ExpectedThought
from llorch_serve.chat.parsing.registry import choose_formats
from llorch_serve.chat.template import ChatTemplate, encode_chat
from llorch_serve.chat.tools import shown_tools
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.requests import ChatPrompt
from llorch_serve.structured.spec import HeldForm, Structured
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.served import ServedManifest

SMALL_CHAT_CHARS: Final = 2**18
"""What a template may be given in any case: it may leave out most of a conversation, and is fast with so
much.
"""


class Chats:
    """Renders conversations, and knows how they are answered. Safe to use from many threads.

    sources: of the chat templates, by name. tool_format, reasoning_format: see
    :class:`llorch_serve.config.EngineConfig`.
    Raises ArtifactError for a broken template, UsageError for a format that does not exist.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        manifest: ServedManifest,
        tokenizer: Tokenizer,
        *,
        tool_format: str,
        reasoning_format: str,
    ) -> None:
        self._model_id = manifest.model_id
        self._tokenizer = tokenizer
        self._templates = _compiled(sources, manifest, tokenizer)
        if self._templates:
            tokenizer.guard  # noqa: B018 - made now, as no request may wait for it
        self._formats = {
            name: choose_formats(source, tools=tool_format, reasoning=reasoning_format)
            for name, source in sources.items()
        }

    def encode(self, prompt: ChatPrompt, *, context: int, most_chars: int) -> tuple[tuple[int, ...], str]:
        """Return a conversation's token ids and the text that they stand for.

        context: most tokens of a sequence. most_chars: of a text that fits it. Raises InvalidRequestError.
        """
        template = self._templates[self.template_name(prompt)]
        if (found := _chars_of(prompt)) > max(most_chars, SMALL_CHAT_CHARS):
            problem = (
                f"found {found} characters in messages, tools, documents and arguments together; expected "
                f"at most {max(most_chars, SMALL_CHAT_CHARS)} for a context of {context} tokens"
            )
            raise InvalidRequestError([FieldViolation("input.chat", problem)])
        return encode_chat(self._tokenizer, template, prompt, most=context, most_chars=most_chars)

    def template_name(self, prompt: ChatPrompt) -> str:
        """Return the name of the template that renders a prompt, as transformers chooses it. Raises
        InvalidRequestError.
        """
        if not self._templates:
            found = f"{self._model_id} has no chat template; send text or tokens instead"
            raise InvalidRequestError([FieldViolation("input.chat", found)])
        if prompt.template_name is None:
            return "tool_use" if shown_tools(prompt) and "tool_use" in self._templates else "default"
        if prompt.template_name not in self._templates:
            found = (
                f"found {prompt.template_name[:100]!r}, expected one of {', '.join(sorted(self._templates))}"
            )
            raise InvalidRequestError([FieldViolation("input.chat.template_name", found)])
        return prompt.template_name

    def form(self, prompt: ChatPrompt, rendered: str, asked: Structured | None) -> HeldForm | None:
        """Return the form that the answer to a prompt is held to; None: it is free.

        rendered: the prompt as text. asked: what the request asks for. Raises InvalidRequestError where a
        call of a tool is required and cannot be held.
        """
        return held_form(self._formats[self.template_name(prompt)], prompt, rendered, asked)

    def parser(
        self, prompt: ChatPrompt, rendered: str, *, key: str, form: HeldForm | None
    ) -> AnswerParser | None:
        """Return what reads calls and thoughts out of the answer to a prompt; None: nothing does.

        rendered: the prompt as text. key: what the ids of calls are made from. form: what the answer is held
        to.
        """
        return parser_for(self._formats[self.template_name(prompt)], prompt, rendered, key=key, form=form)

    def thought(self, prompt: ChatPrompt, rendered: str, *, held: bool) -> ExpectedThought | None:
        """Return the thought that the answer to a prompt may begin with. held: it is held to a form."""
        return expected_thought(self._formats[self.template_name(prompt)], prompt, rendered, held=held)

    def kept_tokens(self, prompt: ChatPrompt) -> frozenset[int]:
        """Return the special tokens that are markers of the formats in which a prompt is answered."""
        markers = self._formats[self.template_name(prompt)].markers(calls=bool(shown_tools(prompt)))
        return frozenset(id_ for id_, text in self._tokenizer.special_tokens.items() if text in markers)


def _chars_of(prompt: ChatPrompt) -> int:
    """Return how many characters a template is given."""
    found = sum(map(len, (*prompt.tools, *prompt.documents, prompt.template_arguments or "")))
    for message in prompt.messages:
        parts = message.content if isinstance(message.content, tuple) else (message.content or "",)
        optional = (message.name, message.tool_call_id, message.reasoning_content)
        found += len(message.role) + sum(map(len, parts)) + sum(len(text) for text in optional if text)
        found += sum(len(call.name) + len(call.arguments) + len(call.id) for call in message.tool_calls)
    return found


def _compiled(
    sources: Mapping[str, str], manifest: ServedManifest, tokenizer: Tokenizer
) -> dict[str, ChatTemplate]:
    def written(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.token_text(token_id)

    if isinstance(manifest.template_tokens, msgspec.UnsetType):
        bos, eos, others = written(manifest.bos_token_id), written(manifest.eos_token_id), {}
    else:
        others = dict(manifest.template_tokens)
        bos, eos = others.pop("bos_token", None), others.pop("eos_token", None)
    return {name: ChatTemplate(source, bos, eos, other_tokens=others) for name, source in sources.items()}
