"""From a prompt of any kind to token ids: text, ids as they are, or a conversation through the model's template."""

from __future__ import annotations

from typing import Final

from llorch_serve.chat import ChatTemplate, encode_chat
from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.requests import Prompt, TextPrompt, TokenPrompt
from llorch_serve.served import ServedModel
from llorch_serve.text import Tokenizer

_NORMALISING: Final = 4
"""How many times shorter a tokenizer's normaliser may make a text before its length is held against it."""


class PromptEncoder:
    """Encodes prompts for one model. Safe to use from many threads."""

    def __init__(self, artifact: ServedModel, tokenizer: Tokenizer) -> None:
        manifest = artifact.manifest
        self.tokenizer = tokenizer
        self._model_id = manifest.model_id
        self._vocab_size = manifest.model.vocab_size
        self._template = _load_template(artifact, tokenizer)

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def encode(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return a prompt's token ids and the text they stand for. Raises InvalidRequestError."""
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids, self._text_of(prompt.token_ids)
        if isinstance(prompt, TextPrompt):
            return self.tokenizer.encode(prompt.text, add_special_tokens=True), prompt.text
        if self._template is None:
            found = f"{self._model_id} has no chat template; send text or tokens instead"
            raise InvalidRequestError([FieldViolation("input.chat", found)])
        return encode_chat(self.tokenizer, self._template, prompt.messages)

    def oversize(self, prompt: Prompt, *, context: int) -> list[FieldViolation]:
        """Return what is wrong with a text so long that no tokenizer could make it fit, before one is busy for seconds."""
        if not isinstance(prompt, TextPrompt):
            return []
        longest = self.tokenizer.longest_token
        if len(prompt.text) <= _NORMALISING * context * longest:
            return []
        found = (
            f"found {len(prompt.text)} characters; the context holds {context} tokens, prompt and answer together, of "
            f"at most {longest} characters each"
        )
        return [FieldViolation("input", found)]

    def violations(self, ids: tuple[int, ...], *, context: int) -> list[FieldViolation]:
        """Return what keeps encoded ids from being run in a context of so many tokens; empty if all is well."""
        if not ids:
            return [FieldViolation("input", "found an empty prompt, expected at least one token")]
        if len(ids) >= context:
            found = f"found a prompt of {len(ids)} tokens; the context holds {context}, prompt and answer together"
            return [FieldViolation("input", found)]
        # A tokenizer may know more tokens than the model has embeddings, and kernels do not all check their bounds.
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


def _load_template(artifact: ServedModel, tokenizer: Tokenizer) -> ChatTemplate | None:
    source = artifact.chat_template()
    if source is None:
        return None
    manifest = artifact.manifest

    def written(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.token_text(token_id)

    return ChatTemplate(
        source, bos_token=written(manifest.bos_token_id), eos_token=written(manifest.eos_token_id)
    )
