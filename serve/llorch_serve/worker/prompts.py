"""From a prompt of any kind to token ids: text, ids as they are, or a conversation through the model's
template (``chats.py``).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

from llorch_serve.config import AUTO
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from llorch_serve.structured.spec import HeldForm, Structured
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.served import ServedModel

if TYPE_CHECKING:
    from llorch_serve.chat.parsing.answer import AnswerParser
    from llorch_serve.chat.parsing.reasoning import ExpectedThought
    from llorch_serve.worker.chats import Chats

_NORMALISING: Final = 4
"""How many times shorter a tokenizer's normaliser may make a text before its length is held against it."""

MAX_CHARS: Final = 4 * 2**20
"""Of a text, whatever the context: what the longest contexts hold. HTTP takes as many bytes."""

COUNTED_TOKENS: Final = 2**16
"""What may be tokenised, or made text again, in any case: whoever counts tokens wants to know by how many a
context is exceeded.
"""


class PromptEncoder:
    """Encodes prompts for one model, and knows how it answers chats. Safe to use from many threads.

    tool_format, reasoning_format: see :class:`llorch_serve.config.EngineConfig`.
    chats: conversations will come, so that all for them is made now; False: when the first one comes.
    Raises ArtifactError for a broken template, UsageError for a format that does not exist.
    """

    def __init__(
        self,
        artifact: ServedModel,
        tokenizer: Tokenizer,
        *,
        tool_format: str = AUTO,
        reasoning_format: str = AUTO,
        chats: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self._manifest = artifact.manifest
        self._vocab_size = artifact.manifest.model.vocab_size
        self._sources = artifact.chat_templates()
        self._formats = {"tool_format": tool_format, "reasoning_format": reasoning_format}
        if chats or set(self._formats.values()) != {AUTO}:  # a format that was named may not exist
            self._chats  # noqa: B018 - made now, as no request may wait for it

    @cached_property
    def _chats(self) -> Chats:
        from llorch_serve.worker.chats import Chats

        return Chats(self._sources, self._manifest, self.tokenizer, **self._formats)

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._sources)

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
        return self._chats.encode(prompt, context=context, most_chars=most_chars)

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

    def form(self, prompt: Prompt, rendered: str, asked: Structured | None) -> HeldForm | None:
        """Return the form that the answer to a prompt is held to; None: it is free.

        rendered: the prompt as text. asked: what the request asks for. Raises InvalidRequestError where a
        call of a tool is required and cannot be held.
        """
        if not isinstance(prompt, ChatPrompt):
            return asked
        return self._chats.form(prompt, rendered, asked)

    def parser(
        self, prompt: Prompt, rendered: str, *, key: str, form: HeldForm | None = None
    ) -> AnswerParser | None:
        """Return what reads calls and thoughts out of the answer to a prompt; None: nothing does.

        rendered: the prompt as text. key: what the ids of calls are made from. form: what the answer is held
        to.
        """
        if not isinstance(prompt, ChatPrompt):
            return None
        return self._chats.parser(prompt, rendered, key=key, form=form)

    def thought(self, prompt: Prompt, rendered: str, *, held: bool) -> ExpectedThought | None:
        """Return the thought that the answer to a prompt may begin with. held: it is held to a form."""
        if not isinstance(prompt, ChatPrompt):
            return None
        return self._chats.thought(prompt, rendered, held=held)

    def kept_tokens(self, prompt: Prompt) -> frozenset[int]:
        """Return the special tokens that are markers of the formats in which a prompt is answered."""
        if not isinstance(prompt, ChatPrompt):
            return frozenset()
        return self._chats.kept_tokens(prompt)

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
