"""Texts and token ids of one model, for those who ask for nothing else.

Every loaded model answers so, and the front of a cluster, which has the tokenizer and no model.
"""

from __future__ import annotations

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.requests import Prompt
from llorch_serve.worker.prompts import COUNTED_TOKENS, PromptEncoder


class TextMethods:
    """Base of what tokenises for callers. context: most tokens of a sequence."""

    def __init__(self, prompts: PromptEncoder, *, context: int) -> None:
        self._prompts = prompts
        self._tokenizer = prompts.tokenizer
        self._context = context

    def tokenize(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Return a prompt's token ids and the text they stand for, COUNTED_TOKENS at most if the context
        holds fewer.

        Raises InvalidRequestError.
        """
        return self._prompts.encode(prompt, context=self._most_counted)

    def detokenize(self, token_ids: tuple[int, ...], *, keep_special_tokens: bool) -> str:
        """Return the text of token ids. Raises InvalidRequestError for more than :meth:`tokenize` gives, or
        ids outside the vocabulary.
        """
        if len(token_ids) > self._most_counted:
            found = f"found {len(token_ids)} ids, expected at most {self._most_counted}; send them in parts"
            raise InvalidRequestError([FieldViolation("token_ids", found)])
        return self._tokenizer.decode(token_ids, keep_special_tokens=keep_special_tokens)

    @property
    def _most_counted(self) -> int:
        """Most tokens of a text that is only tokenised, or made of tokens."""
        return max(self._context, COUNTED_TOKENS)
