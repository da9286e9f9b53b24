"""From a prompt of any kind to token ids: text, ids as they are, or a conversation through the model's
template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from llorch_serve.chat.parsing.answer import AnswerParser, expected_thought, held_form, parser_for
from llorch_serve.chat.parsing.reasoning import ExpectedThought
from llorch_serve.chat.parsing.registry import AUTO, choose_formats
from llorch_serve.chat.template import ChatTemplate, encode_chat
from llorch_serve.chat.tools import shown_tools
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from llorch_serve.structured.spec import HeldForm, Structured
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.served import ServedModel

_NORMALISING: Final = 4
"""How many times shorter a tokenizer's normaliser may make a text before its length is held against it."""

MAX_CHARS: Final = 4 * 2**20
"""Of a text, whatever the context: what the longest contexts hold. HTTP takes as many bytes."""

COUNTED_TOKENS: Final = 2**16
"""What may be tokenised, or made text again, in any case: whoever counts tokens wants to know by how many a
context is exceeded.
"""

SMALL_CHAT_CHARS: Final = 2**18
"""What a template may be given in any case: it may leave out most of a conversation, and is fast with so
much.
"""


class PromptEncoder:
    """Encodes prompts for one model, and knows how it answers chats. Safe to use from many threads.

    tool_format, reasoning_format: see :class:`llorch_serve.config.EngineConfig`.
    Raises ArtifactError for a broken template, UsageError for a format that does not exist.
    """

    def __init__(
        self,
        artifact: ServedModel,
        tokenizer: Tokenizer,
        *,
        tool_format: str = AUTO,
        reasoning_format: str = AUTO,
    ) -> None:
        manifest = artifact.manifest
        self.tokenizer = tokenizer
        self._model_id = manifest.model_id
        self._vocab_size = manifest.model.vocab_size
        sources = artifact.chat_templates()
        self._templates = _compiled(sources, artifact, tokenizer)
        if self._templates:
            tokenizer.guard  # noqa: B018 - made now, as no request may wait for it
        self._formats = {
            name: choose_formats(source, tools=tool_format, reasoning=reasoning_format)
            for name, source in sources.items()
        }

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._templates)

    def encode(self, prompt: Prompt, *, context: int) -> tuple[tuple[int, ...], str]:
        """Return a prompt's token ids and the text they stand for.

        context: most tokens of a sequence. What clearly goes beyond is refused before it is rendered or
            encoded, so that nobody
        keeps a thread busy with it; what is within :meth:`violations` tells.
        Raises InvalidRequestError.
        """
        if isinstance(prompt, TokenPrompt):
            if len(prompt.token_ids) > context:
                raise InvalidRequestError([_too_long(len(prompt.token_ids), context)])
            return prompt.token_ids, self._text_of(prompt.token_ids)
        most_chars = self.most_chars(context)
        if isinstance(prompt, TextPrompt):
            self.check_chars(len(prompt.text), context=context)
            added = prompt.add_special_tokens
            ids = self.tokenizer.encode(prompt.text, add_special_tokens=added, most=context)
            # A text may bring the BOS that the tokenizer adds.
            return self.tokenizer.started(ids) if added else ids, prompt.text
        template = self._templates[self.template_name(prompt)]
        if (found := _chars_of(prompt)) > max(most_chars, SMALL_CHAT_CHARS):
            problem = (
                f"found {found} characters in messages, tools, documents and arguments together; expected "
                f"at most "
                f"{max(most_chars, SMALL_CHAT_CHARS)} for a context of {context} tokens"
            )
            raise InvalidRequestError([FieldViolation("input.chat", problem)])
        return encode_chat(self.tokenizer, template, prompt, most=context, most_chars=most_chars)

    def encode_cut(self, prompt: TextPrompt, most: int) -> tuple[int, ...]:
        """Return a text's token ids, ``most`` at most: what is too much is cut off at the text's end, before
        the tokens that the tokenizer puts behind one. Raises InvalidRequestError.
        """
        text = prompt.text[: self.most_chars(most)]  # no longer one has tokens that would be left
        added = prompt.add_special_tokens
        plain = self.tokenizer.encode(text, add_special_tokens=False)
        if not added:
            return plain[:most]
        whole = self.tokenizer.started(self.tokenizer.encode(text, add_special_tokens=True))
        if len(whole) <= most:
            return whole
        places = (i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain)
        start = next(places, 0)
        before, after = whole[:start], whole[start + len(plain) :]
        room = most - len(before) - len(after)
        if room < 1:
            found = (
                f"found room for {most} tokens, of which the tokenizer's own around a text take "
                f"{len(before) + len(after)}; expected more"
            )
            raise InvalidRequestError([FieldViolation("input", found)])
        return before + plain[:room] + after

    def most_chars(self, context: int) -> int:
        """Return a number of characters that no text has which fits a context of so many tokens."""
        return min(_NORMALISING * context * self.tokenizer.longest_token, MAX_CHARS)

    def check_chars(self, found: int, *, context: int, field: str = "input") -> None:
        """Raise InvalidRequestError for a text of so many characters that no tokenizer could make it fit."""
        if found > self.most_chars(context):
            problem = (
                f"found {found} characters; the context holds {context} tokens, prompt and answer together, "
                f"of "
                f"at most {self.tokenizer.longest_token} characters each, and no text may have more than "
                f"{MAX_CHARS}"
            )
            raise InvalidRequestError([FieldViolation(field, problem)])

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

    def form(self, prompt: Prompt, rendered: str, asked: Structured | None) -> HeldForm | None:
        """Return the form that the answer to a prompt is held to; None: it is free.

        rendered: the prompt as text. asked: what the request asks for. Raises InvalidRequestError where a
        call of a tool is required and cannot be held.
        """
        if not isinstance(prompt, ChatPrompt):
            return asked
        return held_form(self._formats[self.template_name(prompt)], prompt, rendered, asked)

    def parser(
        self, prompt: Prompt, rendered: str, *, key: str, form: HeldForm | None = None
    ) -> AnswerParser | None:
        """Return what reads calls and thoughts out of the answer to a prompt; None: nothing does.

        rendered: the prompt as text. key: what the ids of calls are made from. form: what the answer is held
        to.
        """
        if not isinstance(prompt, ChatPrompt):
            return None
        return parser_for(self._formats[self.template_name(prompt)], prompt, rendered, key=key, form=form)

    def thought(self, prompt: Prompt, rendered: str, *, held: bool) -> ExpectedThought | None:
        """Return the thought that the answer to a prompt may begin with. held: it is held to a form."""
        if not isinstance(prompt, ChatPrompt):
            return None
        return expected_thought(self._formats[self.template_name(prompt)], prompt, rendered, held=held)

    def kept_tokens(self, prompt: Prompt) -> frozenset[int]:
        """Return the special tokens that are markers of the formats in which a prompt is answered."""
        if not isinstance(prompt, ChatPrompt):
            return frozenset()
        markers = self._formats[self.template_name(prompt)].markers(calls=bool(shown_tools(prompt)))
        return frozenset(id_ for id_, text in self.tokenizer.special_tokens.items() if text in markers)

    def violations(self, ids: tuple[int, ...], *, context: int) -> list[FieldViolation]:
        """Return what keeps encoded ids from being run in a context of so many tokens; empty if all is
        well.
        """
        if not ids:
            return [FieldViolation("input", "found an empty prompt, expected at least one token")]
        if len(ids) >= context:
            return [_too_long(len(ids), context)]
        # A tokenizer may know more tokens than the model has embeddings, and kernels do not all check their
        # bounds.
        if max(ids) >= self._vocab_size:
            found = f"found a prompt with token {max(ids)}; this model knows ids 0 to {self._vocab_size - 1}"
            return [FieldViolation("input", found)]
        return []

    def _text_of(self, ids: tuple[int, ...]) -> str:
        """Return the text of ids that the model knows; those that the tokenizer lacks stand for none."""
        bad = [id_ for id_ in ids if not 0 <= id_ < self._vocab_size]
        if bad:
            found = f"found {bad[0]}, expected ids of the vocabulary, 0 to {self._vocab_size - 1}"
            raise InvalidRequestError([FieldViolation("input.tokens", found)])
        known = tuple(id_ for id_ in ids if id_ < self.tokenizer.vocab_size)
        return self.tokenizer.decode(known, keep_special_tokens=True)


def _too_long(found: int, context: int) -> FieldViolation:
    problem = f"found a prompt of {found} tokens; the context holds {context}, prompt and answer together"
    return FieldViolation("input", problem)


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
    sources: Mapping[str, str], artifact: ServedModel, tokenizer: Tokenizer
) -> dict[str, ChatTemplate]:
    manifest = artifact.manifest

    def written(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.token_text(token_id)

    if isinstance(manifest.template_tokens, msgspec.UnsetType):
        bos, eos, others = written(manifest.bos_token_id), written(manifest.eos_token_id), {}
    else:
        others = dict(manifest.template_tokens)
        bos, eos = others.pop("bos_token", None), others.pop("eos_token", None)
    return {name: ChatTemplate(source, bos, eos, other_tokens=others) for name, source in sources.items()}
